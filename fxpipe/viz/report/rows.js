// The rows of the timeline: where each rank's stand, and how their boxes, texts and lines are painted.
"use strict";

// Heights of kinds in a row, so that they differ without color: F whole, B and BW lower, W half.
const HEIGHTS = [1, 0.8, 0.5, 0.8];
const LABELS = 108; // pixels left of the rows

class Rows {
  // Rows from the top: per rank one for each layer, below the predicted one its links.
  place() {
    const { model } = this,
      layers = model.layers.length;
    const transfers = model.predicted.data.transfers.some((own) => own.length);
    const exchanges = model.predicted.data.exchanges.some((own) => own.length);
    const thin = 5,
      lanes = model.predicted.data.lane_exchanges.some((own) => own.length),
      beside = (transfers ? 2 * thin + 2 : 0) + (exchanges ? thin + 2 : 0) + (lanes ? thin + 2 : 0);
    const room = Math.max(160, this.host.parentElement.clientHeight - 290) / model.ranks,
      tight = room < 36;
    const [between, apart] = [layers > 1 ? (tight ? 1 : 2) : 0, tight ? 3 : layers > 1 ? 6 : 4]; // layers, ranks
    const height = clamp(Math.floor((room - beside - apart) / layers) - between, layers > 1 ? 7 : 9, 40);
    this.rows = [];
    let y = 2;
    for (let rank = 0; rank < model.ranks; rank++) {
      for (const layer of model.layers) {
        this.rows.push({ rank, layer, y, height });
        y += height + between;
      }
      if (transfers)
        for (const out of [1, 0]) {
          this.rows.push({ rank, links: "transfers", out, y: y + 1, height: thin });
          y += thin + 1;
        }
      if (exchanges) {
        this.rows.push({ rank, links: "exchanges", y: y + 1, height: thin });
        y += thin + 2;
      }
      if (lanes) {
        this.rows.push({ rank, links: "lane_exchanges", y: y + 1, height: thin });
        y += thin + 2;
      }
      y += apart;
    }
    this.height = y;
  }

  colors() {
    const kinds = ["F", "B", "W", "B"];
    this.fill = kinds.map((kind) => color(kind));
    this.late = kinds.map((kind) => color(`${kind}-late`));
    this.spread = [color("S"), color("T")];
    this.fine = new FineImage();
    this.ink = color("ink");
    this.tone = {
      idle: color("idle"),
      soft: color("soft"),
      select: color("select"),
      path: color("path"),
      page: color("page"),
      out: color("offload"),
      in: color("reload"),
      exchange: color("exchange"),
      update: color("update"),
      onBox: color("on-box"),
      W: color("W"),
      Wlate: color("W-late"),
    };
    this.hatches = [
      null,
      this.hatch((c) => {
        c.moveTo(0, 6);
        c.lineTo(6, 0);
      }),
      this.hatch((c) => {
        c.moveTo(3, 0);
        c.lineTo(3, 6);
      }),
      this.hatch((c) => {
        c.moveTo(0, 6);
        c.lineTo(6, 0);
        c.moveTo(3, 0);
        c.lineTo(3, 6);
      }),
    ];
  }

  hatch(lines) {
    const tile = el("canvas", { width: 6, height: 6 }),
      c = tile.getContext("2d");
    c.strokeStyle = this.tone.onBox;
    c.globalAlpha = 0.55;
    c.lineWidth = 1;
    lines(c);
    c.stroke();
    return c.createPattern(tile, "repeat");
  }

  draw(ctx, box) {
    const began = performance.now(),
      ratio = devicePixelRatio;
    const [low, high] = this.range,
      scale = box.width / (high - low);
    const at = { x: (tick) => box.left + (tick - low) * scale, y: (y) => box.top + y * ratio, ratio, low, high, box };
    ctx.save();
    ctx.font = `${11 * ratio}px system-ui`;
    ctx.textBaseline = "middle";
    this.labels(ctx, at);
    ctx.beginPath();
    ctx.rect(box.left, box.top, box.width, box.height);
    ctx.clip();
    const chosen =
      this.selected && this.selected.k < this.selected.layer.tracks[this.selected.rank].n && !this.selected.gap
        ? this.selected.layer.tracks[this.selected.rank].microbatch[this.selected.k]
        : null;
    this.fine.begin(Math.ceil(box.width), Math.ceil(this.height * ratio));
    for (const row of this.rows) {
      ctx.fillStyle = this.tone.idle;
      if (row.layer) ctx.fillRect(at.x(0), at.y(row.y), row.layer.end * scale, row.height * ratio);
      if (row.layer) this.boxes(ctx, at, row, chosen);
      else this.links(ctx, at, row);
      if (row.layer === this.model.predicted) this.update(ctx, at, row);
    }
    this.fine.end(ctx, box.left, box.top);
    if (this.critical) this.drawPath(ctx, at);
    if (chosen !== null) this.drawCourse(ctx, at, chosen);
    if (this.selected) this.outline(ctx, at, this.selected);
    ctx.restore();
    this.drawn = performance.now() - began;
  }

  // The name of each rank, its busy share, predicted and measured, and its peak memory: in two lines if there is
  // room, else side by side.
  labels(ctx, at) {
    const { model } = this,
      step = Math.ceil(13 / (this.height / model.ranks)),
      two = model.layers.length > 1;
    const text = (words, size, align, tone, y) => {
      ctx.font = `${size * at.ratio}px system-ui`;
      ctx.textAlign = align;
      ctx.fillStyle = tone;
      ctx.fillText(words, align === "left" ? 4 * at.ratio : at.box.left - 5 * at.ratio, at.y(y));
    };
    for (const row of this.rows) {
      const first = row.layer === model.layers[0];
      if (!row.layer || row.rank % step) continue;
      const busy = percent0(row.layer.busy(row.rank)),
        peak = bytesText(model.peaks[row.rank]),
        tone = row.rank === this.events.rank() ? this.tone.select : this.ink,
        middle = row.y + row.height / 2,
        lines = !two && row.height >= 26;
      if (first) text(row.height < 13 ? `${row.rank}` : `rank ${row.rank}`, 11, "left", tone, lines ? middle - 7 : middle);
      if (two) {
        text(`${busy} ${row.layer.name.slice(0, 4)}`, 9.5, "right", this.tone.soft, middle);
        if (!first) text(peak, 9.5, "left", this.tone.soft, middle);
      } else if (lines) text(`${busy} · ${peak}`, 10, "left", this.tone.soft, middle + 7);
      else text(row.height < 13 ? `${busy} ${peak}` : busy, 9.5, "right", this.tone.soft, middle);
    }
    ctx.font = `${11 * at.ratio}px system-ui`;
    ctx.textAlign = "left";
  }

  // Boxes of one row, style by style; then what fits into them.
  boxes(ctx, at, row, chosen) {
    const t = row.layer.tracks[row.rank],
      first = Math.max(0, t.at(at.low)),
      last = t.at(at.high);
    const stages = this.model.stagesOf[row.rank],
      top = at.y(row.y),
      whole = row.height * at.ratio;
    const styles = t.styled(stages, this.model.vocabulary);
    if ((last - first + 1) * FINE * at.ratio > at.x(Math.min(at.high, row.layer.end)) - at.x(Math.max(at.low, 0))) {
      const x = (tick) => at.x(tick) - at.box.left;
      const pixels = Math.round(whole),
        paint = this.paints(pixels);
      const dim = (k) => chosen !== null && t.microbatch[k] !== chosen;
      return this.fine.row(t, first, last, x, Math.round(row.y * at.ratio), pixels, paint, dim);
    }
    styles.forEach((positions, style) => {
      const kind = style >= S ? style - S : style >> 1, // S is as high as F, T as B
        late = style < S && style & 1,
        fill = style >= S ? this.spread[style - S] : (late ? this.late : this.fill)[kind];
      const height = Math.round(whole * HEIGHTS[kind]),
        y = Math.round(top + whole) - height;
      ctx.fillStyle = fill;
      let before = -1;
      for (let i = firstFrom(positions, first); i < positions.length && positions[i] <= last; i++) {
        const k = positions[i],
          left = Math.round(at.x(t.start[k])),
          right = Math.round(at.x(t.end[k]));
        if (right <= before) continue; // another box is on this pixel
        before = right;
        if (chosen !== null) ctx.globalAlpha = t.microbatch[k] === chosen ? 1 : 0.28;
        const wide = Math.max(1, right - left - (right - left > 4 * at.ratio)); // a line between wide ones
        ctx.fillRect(left, y, wide, height);
        if (kind === 3) {
          // BW: B above, W below
          ctx.fillStyle = late ? this.tone.Wlate : this.tone.W;
          ctx.fillRect(left, y + Math.round(height * 0.5), wide, height - Math.round(height * 0.5));
          ctx.fillStyle = fill;
        }
        if (this.patterns && wide > 3 * at.ratio && this.hatches[kind]) {
          ctx.fillStyle = this.hatches[kind];
          ctx.fillRect(left, y, wide, height);
          ctx.fillStyle = fill;
        }
      }
    });
    ctx.globalAlpha = 1;
    if (row.height >= 7 && (last - first) * 22 * at.ratio < at.box.width * 2.5)
      this.texts(ctx, at, row, t, first, last, stages.length > 1, chosen);
  }

  // What fine rows of so many pixels have for each style.
  paints(pixels) {
    return Array.from({ length: 10 }, (_, style) => {
      const kind = style >= S ? style - S : style >> 1,
        late = style < S && style & 1;
      const above = pixelOf(style >= S ? this.spread[kind] : (late ? this.late : this.fill)[kind]);
      const below = kind === 3 ? pixelOf(late ? this.tone.Wlate : this.tone.W) : above;
      return { above, below, high: Math.round(pixels * HEIGHTS[kind]) };
    });
  }

  texts(ctx, at, row, t, first, last, several, chosen) {
    const size = Math.min(11, row.height + 1) * at.ratio,
      middle = at.y(row.y + row.height / 2);
    ctx.font = `${size}px system-ui`;
    ctx.textAlign = "center";
    for (let k = first; k <= Math.min(last + 1, t.n - 1); k++) {
      const left = Math.max(at.x(t.start[k]), at.box.left),
        right = Math.min(at.x(t.end[k]), at.box.left + at.box.width);
      const kind = row.layer.kinds[t.kind[k]],
        long = several ? `${kind}${t.stage[k]}.${t.microbatch[k]}` : `${kind}${t.microbatch[k]}`;
      const fits = (text) => (text.length * 0.6 + (text[0] === "W" ? 0.4 : 0)) * size < right - left - 2;
      const text = fits(long)
        ? long
        : fits(`${t.microbatch[k]}`) && !several
          ? `${t.microbatch[k]}`
          : fits(kind)
            ? kind
            : "";
      const low = HEIGHTS[t.kind[k]];
      ctx.fillStyle = this.tone.onBox;
      ctx.globalAlpha = chosen !== null && t.microbatch[k] !== chosen ? 0.25 : text === kind ? 0.75 : 1;
      if (text && (low > 0.5 || row.height >= 18))
        ctx.fillText(
          text,
          (left + right) / 2,
          low > 0.5 ? middle + (1 - low) * row.height * at.ratio * 0.5 : at.y(row.y + row.height * 0.75),
        );
      const [begin, end] = row.layer.gap(row.rank, k),
        from = Math.max(at.x(begin), at.box.left);
      const why = waitText(this.model, row.layer, row.rank, k),
        space = Math.min(at.x(end), at.box.left + at.box.width) - from;
      ctx.globalAlpha = 1;
      ctx.fillStyle = this.tone.soft;
      if (why && why.length * size * 0.5 < space - 6) ctx.fillText(why, from + space / 2, middle);
    }
    ctx.font = `${11 * at.ratio}px system-ui`;
  }

  links(ctx, at, row) {
    for (const entry of this.model.predicted.data[row.links][row.rank]) {
      const isTransfer = row.links === "transfers",
        [start, length] = isTransfer ? entry.slice(4) : entry.slice(2);
      if (isTransfer && entry[0] !== row.out) continue;
      ctx.fillStyle = isTransfer ? (row.out ? this.tone.out : this.tone.in) : this.tone.exchange;
      ctx.fillRect(at.x(start), at.y(row.y), Math.max(1, at.x(start + length) - at.x(start)), row.height * at.ratio);
    }
  }

  // The optimizer's update, behind the predicted step.
  update(ctx, at, row) {
    const [start, length] = this.model.predicted.data.updates[row.rank],
      left = at.x(start),
      wide = at.x(start + length) - left;
    if (!length) return;
    ctx.fillStyle = this.tone.update;
    ctx.fillRect(left, at.y(row.y), Math.max(1, wide), row.height * at.ratio);
    if (wide < 9 * at.ratio || row.height < 9) return;
    ctx.fillStyle = this.tone.onBox;
    ctx.textAlign = "center";
    ctx.fillText("O", left + wide / 2, at.y(row.y + row.height / 2));
    ctx.textAlign = "left";
  }

  rowOf(layer, rank) {
    return this.rows.find((row) => row.layer === layer && row.rank === rank);
  }

  drawPath(ctx, at) {
    const layer = this.model.predicted;
    ctx.strokeStyle = ctx.fillStyle = this.tone.path;
    ctx.lineWidth = 1.2 * at.ratio;
    let before = null;
    ctx.beginPath();
    for (const [rank, k] of this.path) {
      const t = layer.tracks[rank],
        row = this.rowOf(layer, rank),
        y = at.y(row.y + row.height);
      const [left, right] = [at.x(t.start[k]), at.x(t.end[k])];
      if (before && before.rank !== rank) {
        ctx.moveTo(before.x, before.y);
        ctx.lineTo(left, y - row.height * at.ratio * 0.5);
      }
      if (right >= at.box.left && left <= at.box.left + at.box.width)
        ctx.fillRect(left, y - 2 * at.ratio, right - left, 2 * at.ratio);
      before = { rank, x: right, y: y - row.height * at.ratio * 0.5 };
    }
    ctx.stroke();
  }

  // Lines along the messages of a microbatch.
  drawCourse(ctx, at, microbatch) {
    const { layer } = this.selected;
    ctx.strokeStyle = this.tone.select;
    ctx.lineWidth = at.ratio;
    ctx.globalAlpha = 0.75;
    ctx.beginPath();
    for (const [rank, k] of this.model.course(layer, microbatch))
      for (const { place } of this.model.messages(layer, rank, k, true)) {
        if (!place) continue;
        const [source, target] = [this.rowOf(layer, place[0]), this.rowOf(layer, rank)];
        ctx.moveTo(at.x(layer.tracks[place[0]].end[place[1]]), at.y(source.y + source.height / 2));
        ctx.lineTo(at.x(layer.tracks[rank].start[k]), at.y(target.y + target.height / 2));
      }
    ctx.stroke();
    ctx.globalAlpha = 1;
  }

  outline(ctx, at, { layer, rank, k, gap }) {
    const row = this.rowOf(layer, rank),
      t = layer.tracks[rank];
    const [start, end] = gap ? layer.gap(rank, k) : [t.start[k], t.end[k]];
    ctx.strokeStyle = this.tone.select;
    ctx.lineWidth = 2 * at.ratio;
    ctx.setLineDash(gap ? [4 * at.ratio, 3 * at.ratio] : []);
    ctx.strokeRect(at.x(start), at.y(row.y), Math.max(2, at.x(end) - at.x(start)), row.height * at.ratio);
    ctx.setLineDash([]);
  }
}

// The index of the first of some rising numbers that is at least `least`.
function firstFrom(numbers, least) {
  let low = 0,
    high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < least) low = middle + 1;
    else high = middle;
  }
  return low;
}
