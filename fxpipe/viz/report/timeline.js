// The timeline: uPlot gives axis, scale and cursor, and the rows are painted on its canvas.
"use strict";

class Timeline extends Rows {
  constructor(model, host, events) {
    super();
    Object.assign(this, {
      model,
      host,
      events,
      selected: null,
      critical: true,
      patterns: false,
    });
    this.path = model.predicted.data.critical;
    this.range = [0, model.end];
    this.place();
    this.colors();
    this.plot = new uPlot(
      this.options(),
      [
        [0, model.end],
        [null, null],
      ],
      host,
    );
    this.listen();
  }

  options() {
    return {
      width: this.host.clientWidth,
      height: this.height + 32,
      padding: [0, PADDING, 0, LABELS],
      legend: { show: false },
      cursor: {
        y: false,
        drag: { x: false, y: false, setScale: false },
        points: { show: false },
        sync: { key: "time" },
      },
      scales: { x: { time: false, range: () => this.range }, y: { range: [0, 1] } },
      series: [{}, { show: false }],
      axes: [
        {
          side: 0,
          size: 28,
          stroke: () => color("soft"),
          grid: { stroke: () => color("grid"), width: 1 },
          ticks: { stroke: () => color("grid"), size: 4 },
          font: "11px system-ui",
          values: (_, ticks) => axisTimes(ticks.map((t) => this.model.seconds(t))),
          splits: (u, a, low, high, step) => niceTicks(low, high, this.model.tick, u.width / 110),
        },
        { show: false },
      ],
      hooks: {
        draw: [(u) => this.draw(u.ctx, u.bbox)],
        setCursor: [(u) => this.events.moment(u.cursor.left < 0 ? null : u.posToVal(u.cursor.left, "x"))],
      },
    };
  }

  zoom(factor, tick = (this.range[0] + this.range[1]) / 2) {
    const [low, high] = this.range;
    this.show(tick - (tick - low) * factor, tick + (high - tick) * factor);
  }

  show(low, high) {
    const all = this.model.end,
      size = clamp(high - low, Math.max(20, all * 1e-5), all * 1.02);
    const begin = clamp(low, -0.01 * all, 1.01 * all - size);
    this.range = [begin, begin + size];
    this.redraw();
    this.events.ranged(this.range);
  }

  // Move so that something is in view, at least a little wide.
  reveal(start, end, rank) {
    const [low, high] = this.range,
      size = high - low,
      wide = Math.max(end - start, 1);
    if (end > start && wide < size / 250) this.show((start + end) / 2 - wide * 20, (start + end) / 2 + wide * 20);
    else if (start < low || end > high) this.show((start + end) / 2 - size / 2, (start + end) / 2 + size / 2);
    const row = this.rows.find((r) => r.rank === rank);
    if (row.y < this.host.scrollTop || row.y + 60 > this.host.scrollTop + this.host.clientHeight)
      this.host.scrollTop = row.y - 60;
  }

  redraw() {
    if (this.asked) return;
    this.asked = requestAnimationFrame(() => {
      this.asked = null;
      this.plot.setScale("x", { min: this.range[0], max: this.range[1] });
      this.plot.redraw(false);
    });
  }

  resize() {
    this.place();
    this.plot.setSize({ width: this.host.clientWidth, height: this.height + 32 });
  }

  // What is at a point of the host: an op or a gap.
  hit(event) {
    const over = this.plot.over.getBoundingClientRect();
    const tick = this.plot.posToVal(event.clientX - over.left, "x"),
      y = event.clientY - over.top;
    const row = this.rows.find((r) => y >= r.y - 2 && y <= r.y + r.height + 2);
    if (!row) return null;
    if (event.clientX < over.left) return { rank: row.rank };
    const layer = row.layer || this.model.predicted,
      t = layer.tracks[row.rank];
    const near = t.at(tick + 1.5 / (over.width / (this.range[1] - this.range[0])));
    if (near >= 0 && tick <= t.end[near]) return { layer, rank: row.rank, k: near, gap: false };
    return tick < 0 || tick > layer.end ? { rank: row.rank } : { layer, rank: row.rank, k: near + 1, gap: true };
  }

  listen() {
    let drag = null;
    this.host.addEventListener(
      "wheel",
      (event) => {
        if (event.shiftKey || event.altKey) return;
        event.preventDefault();
        const over = this.plot.over.getBoundingClientRect(),
          tick = this.plot.posToVal(event.clientX - over.left, "x");
        if (Math.abs(event.deltaX) > Math.abs(event.deltaY))
          this.show(...this.range.map((x) => x + (event.deltaX * (this.range[1] - this.range[0])) / over.width));
        else this.zoom(Math.exp(clamp(event.deltaY, -200, 200) * 0.0025), tick);
      },
      { passive: false },
    );
    this.host.addEventListener("pointerdown", (event) => {
      if (event.button === 0)
        drag = { x: event.clientX, y: event.clientY, range: this.range, top: this.host.scrollTop, moved: false };
    });
    addEventListener("pointermove", (event) => {
      if (!drag) return;
      if (Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 3) drag.moved = true;
      if (!drag.moved) return;
      const by = ((drag.x - event.clientX) * (drag.range[1] - drag.range[0])) / this.plot.over.clientWidth;
      this.show(drag.range[0] + by, drag.range[1] + by);
      this.host.scrollTop = drag.top + drag.y - event.clientY;
    });
    addEventListener("pointerup", (event) => {
      const clicked = drag && !drag.moved && this.host.contains(event.target);
      drag = null;
      const hit = clicked && this.hit(event);
      if (hit) this.events.click(hit);
    });
    this.host.addEventListener("dblclick", () => this.show(0, this.model.end));
    this.host.addEventListener("pointermove", (event) => {
      const hit = drag ? null : this.hit(event);
      this.host.title =
        !hit || !hit.layer
          ? ""
          : hit.gap
            ? waitText(this.model, hit.layer, hit.rank, hit.k) || "idle"
            : `${hit.layer.nameOf(hit.rank, hit.k)}, ${this.model.time(hit.layer.tracks[hit.rank].end[hit.k] - hit.layer.tracks[hit.rank].start[hit.k])}`;
    });
  }
}

// Seconds in one unit, with as many digits as tell neighbors apart.
function axisTimes(seconds) {
  if (seconds.length < 2) return seconds.map(secondsText);
  const [unit, size] = [
    ["s", 1],
    ["ms", 1e-3],
    ["µs", 1e-6],
    ["ns", 1e-9],
  ].find(([, size]) => Math.abs(seconds.at(-1)) >= size) || ["ns", 1e-9];
  const after = Math.max(0, Math.ceil(-Math.log10((seconds[1] - seconds[0]) / size) - 1e-6));
  return seconds.map((s) => `${(s / size).toFixed(after)} ${unit}`);
}

// Ticks at round numbers of seconds, which a tick of the data is not.
function niceTicks(low, high, tick, most) {
  const raw = ((high - low) * tick) / Math.max(2, most),
    power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let k = Math.ceil((low * tick) / step); k * step <= high * tick; k++) found.push((k * step) / tick);
  return found;
}
