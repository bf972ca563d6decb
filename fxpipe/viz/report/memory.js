// Memory by kind: one rank's over time, stacked, below the timeline; all ranks' peaks in a tab.
"use strict";

const RECEIVED = 3; // in names.held: beside the simulated memory
const STANDING = ["weights", "gradients", "optimizer", "buffers", "constants", "other"];

// The levels of a rank: {times, parts: [{name, key, bytes: one for each time}]}, from the bottom.
function memoryOf(model, rank) {
  const held = model.memory[rank],
    stages = model.stagesOf[rank],
    times = [0],
    rows = [[]];
  const kinds = model.names.held.flatMap((name, k) =>
    (k < 2 ? stages : [null]).map((stage) => ({
      name: stage === null || stages.length === 1 ? name : `${name}, stage ${stage}`,
      k,
      stage,
    })),
  );
  const index = (k, stage) =>
    kinds.findIndex((kind) => kind.k === k && (kind.stage === null || kind.stage === stage));
  let level = kinds.map(() => 0),
    now = 0;
  rows[0] = level;
  for (let i = 0; i < held.time.length; i++) {
    now += held.time[i];
    if (now > times.at(-1)) {
      times.push(now);
      rows.push((level = level.slice()));
    }
    level[index(+held.held[i], held.stage[i])] += held.bytes[i];
  }
  times.push(Math.max(now, model.predicted.end));
  rows.push(level.slice());
  const standing = STANDING.filter((name) => held[name]).map((name) => ({
    name,
    key: name,
    bytes: times.map(() => held[name]),
  }));
  const moving = kinds.map((kind, j) => ({
    name: kind.name,
    key: `held${kind.k}${kind.stage !== null && stages.indexOf(kind.stage) % 2 ? "-late" : ""}`,
    k: kind.k,
    stage: kind.stage,
    bytes: rows.map((row) => row[j]),
  }));
  return { rank, times, parts: [...standing, ...moving.filter((part) => part.bytes.some(Boolean))] };
}

// The time index at which the simulated memory of a rank is largest.
function peakOf(memory) {
  let best = 0,
    most = -1;
  memory.times.forEach((_, i) => {
    const sum = memory.parts.reduce((total, part) => total + (part.k === RECEIVED ? 0 : part.bytes[i]), 0);
    if (sum > most) [best, most] = [i, sum];
  });
  return { index: best, bytes: most, tick: memory.times[best] };
}

class MemoryStrip {
  constructor(model, head, host, events) {
    this.words = el("span");
    const button = el(
      "button",
      {
        title: "What is live at the peak of this rank",
        onclick: () => events.live(this.memory.rank, this.peak.tick, true),
      },
      "What is live at the peak?",
    );
    fill(head, button, " ", this.words);
    Object.assign(this, { model, host, events });
    this.show(0);
  }

  show(rank) {
    this.moment = null;
    this.memory = memoryOf(this.model, rank);
    this.peak = peakOf(this.memory);
    const { times, parts } = this.memory,
      sums = [];
    let under = times.map(() => 0);
    for (const part of parts) sums.push((under = under.map((x, i) => x + part.bytes[i])));
    this.plot?.destroy();
    const fill = (part) => color(part.key);
    this.plot = new uPlot(
      {
        width: this.host.clientWidth,
        height: this.host.clientHeight || 150,
        padding: [6, PADDING, 8, 0],
        legend: { show: false },
        cursor: {
          y: false,
          drag: { x: false, y: false, setScale: false },
          points: { show: false },
          sync: { key: "time" },
        },
        scales: {
          x: { time: false, range: () => this.events.range() },
          y: { range: (u, low, high) => [0, high * 1.06 || 1] },
        },
        axes: [
          { show: false },
          {
            size: LABELS,
            gap: 2,
            stroke: () => color("soft"),
            font: "10px system-ui",
            grid: { stroke: () => color("grid"), width: 1 },
            ticks: { show: false },
            splits: (u, a, low, high) => byteTicks(high),
            values: (_, ticks) => ticks.map((t) => (t ? bytesText(t).replace(" ", "") : "0")),
          },
        ],
        series: [
          {},
          ...parts
            .map((part) => ({
              label: part.name,
              stroke: () => color("page"),
              width: 0.5,
              fill: () => fill(part),
              paths: uPlot.paths.stepped({ align: 1 }),
              points: { show: false },
            }))
            .reverse(),
        ],
        hooks: {
          draw: [(u) => this.mark(u)],
          setCursor: [(u) => this.events.moment(u.cursor.left < 0 ? null : u.posToVal(u.cursor.left, "x"))],
        },
      },
      [times, ...sums.reverse()],
      this.host,
    );
    this.plot.over.addEventListener("click", (event) =>
      this.events.live(rank, this.plot.posToVal(event.offsetX, "x")),
    );
    this.say();
  }

  // Lines at the peak, and at the moment that was chosen.
  mark(u) {
    for (const [tick, name, wide] of [
      [this.peak.tick, "path", 1],
      [this.moment, "select", 2],
    ]) {
      const x = tick === null ? -1 : u.valToPos(tick, "x", true);
      if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
      u.ctx.fillStyle = color(name);
      u.ctx.fillRect(x, u.bbox.top, wide * devicePixelRatio, u.bbox.height);
    }
  }

  say(tick = null) {
    const { rank, parts, times } = this.memory;
    let i = this.peak.index;
    if (tick !== null) {
      i = times.findIndex((t) => t > tick) - 1;
      if (i < 0) i = times.length - 1;
    }
    fill(
      this.words,
      el("b", {}, `Memory of rank ${rank}, predicted,`),
      tick === null ? " at its peak, " : " at ",
      el(
        "span",
        { class: "num" },
        this.model.time(times[i] && tick === null ? this.peak.tick : (tick ?? this.peak.tick)),
      ),
      ": ",
      parts
        .filter((part) => part.bytes[i] || part.k === RECEIVED)
        .map((part) => el("span", { class: "key" }, swatch(part.key), `${part.name} ${bytesText(part.bytes[i])}`)),
    );
  }

  resize() {
    if (this.host.clientHeight) this.plot.setSize({ width: this.host.clientWidth, height: this.host.clientHeight });
  }
}

const swatch = (key) => {
  const made = el("i", { class: "swatch" });
  made.style.background = `var(--${key})`;
  return made;
};

function byteTicks(high) {
  const raw = high / 3,
    base = BYTES[0] === 1000 ? 10 : 2,
    power = base ** Math.floor(Math.log(raw || 1) / Math.log(base)),
    step = power * (base === 2 ? [1, 2] : [1, 2, 5, 10]).find((m) => raw <= power * m * 1.5);
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, k) => k * step);
}

// What a rank holds at a moment: [{name, key, bytes, ops}], ops: the names of the forwards whose values they are.
function liveAt(model, rank, tick) {
  const memory = memoryOf(model, rank),
    t = model.predicted.tracks[rank];
  let i = memory.times.findIndex((time) => time > tick) - 1;
  if (i < 0) i = memory.times.length - 1;
  const alive = (part) => {
    const found = [];
    for (let k = 0; k < t.n; k++) {
      if (t.stage[k] !== part.stage || !PHASES_OF[t.kind[k]].includes("F")) continue;
      const end = (phase) => {
        const p = model.predicted.places.get(`${phase}${t.stage[k]}.${t.microbatch[k]}`);
        return p ? t.end[p[1]] : Infinity;
      };
      const [from, until] = part.k === 0 ? [t.start[k], end("B")] : [end("B"), end("W")];
      if (from <= tick && tick < until) found.push(t.microbatch[k]);
    }
    return found;
  };
  return memory.parts
    .map((part) => ({ ...part, now: part.bytes[i], microbatches: part.k === 0 || part.k === 1 ? alive(part) : null }))
    .filter((part) => part.now);
}

// What a stage keeps of a microbatch, by module: [path, bytes, whether W reads it], the largest first.
function keptBy(model, stage, until = null) {
  if (!model.graph) return [];
  const { kept, path, texts, stage: stages } = model.graph,
    sums = new Map();
  for (const [home, op, bytes, last] of kept) {
    if (home !== stage || (until && last !== until)) continue;
    const name = stages[op] === stage ? texts[path[op]] || "(the model itself)" : `received: ${model.graph.name[op]}`;
    sums.set(name, (sums.get(name) || 0) + bytes);
  }
  return [...sums].sort((a, b) => b[1] - a[1]);
}

function memoryTab(model, host, events) {
  const all = Array.from({ length: model.ranks }, (_, rank) => memoryOf(model, rank)),
    peaks = all.map(peakOf);
  const most = Math.max(...peaks.map((peak) => peak.bytes));
  const keys = new Map(
    all.flatMap((memory) =>
      memory.parts
        .filter((p) => p.k !== RECEIVED)
        .map((p) => [p.key, p.name.replace(/, stage.*/, p.key.endsWith("-late") ? ", later stages" : "")]),
    ),
  );
  const columns = [
    (part) => part.key === "weights",
    (part) => part.key === "gradients",
    (part) => part.key === "optimizer",
    (part) => part.k === 0,
    (part) => part.k === 1,
  ];
  const rows = all.map((memory, rank) => {
    const parts = memory.parts
      .filter((part) => part.k !== RECEIVED)
      .map((part) => ({ ...part, now: part.bytes[peaks[rank].index] }));
    const made = bar(
      parts.map((part) => ({ share: part.now / most, class: "", title: `${part.name}: ${bytesText(part.now)}` })),
    );
    parts.forEach((part, k) => {
      made.children[k].style.background = `var(--${part.key})`;
    });
    const of = (test) => bytesText(parts.filter(test).reduce((sum, part) => sum + part.now, 0));
    return el(
      "tr",
      {
        tabindex: 0,
        class: "link",
        onclick: () => events.live(rank, peaks[rank].tick, true),
        onkeydown: (e) => e.key === "Enter" && events.live(rank, peaks[rank].tick, true),
      },
      [
        rank,
        made,
        bytesText(peaks[rank].bytes),
        ...columns.map(of),
        of((part) => !columns.some((is) => is(part))),
        bytesText(model.memory[rank].pool),
        model.time(peaks[rank].tick),
      ].map((x, k) => el("td", { class: k === 1 ? "wide" : "n" }, x)),
    );
  });
  host.append(
    el("h2", {}, "The largest memory of each rank, and what it holds then"),
    el(
      "p",
      {},
      [...keys].map(([key, name]) => el("span", { class: "key" }, swatch(key), name)),
    ),
    table(
      [
        "rank",
        "",
        "peak",
        "weights",
        "gradients",
        "optimizer (AdamW's)",
        "saved activations",
        "kept for W",
        "other",
        "offload pool",
        "at",
      ],
      rows,
      [0, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    ),
    el(
      "p",
      { class: "note" },
      "Choose a rank to see which microbatches and modules it holds at that moment. Messages that have arrived and wait for their op are drawn below the timeline, above the others; the simulator's memory does not count them.",
    ),
  );
}
