// The data with its columns unfolded: what ran when, and what it needs of whom.
"use strict";

const [MESSAGE, TRANSFER, EXCHANGE] = [1, 2, 3]; // causes, as in names.causes; 0 is the rank itself
const PHASES_OF = [["F"], ["B"], ["W"], ["B", "W"]]; // by kind: F, B, W, BW

const [S, T] = [8, 9]; // styles of vocabulary stages: before and after their barrier

// The ops of one rank.  Times in ticks.
class Track {
  constructor(columns, rank) {
    const n = columns.kind.length;
    Object.assign(this, { n, rank, transfer: columns.transfer });
    this.kind = Uint8Array.from(columns.kind, Number);
    this.cause = Uint8Array.from(columns.cause, Number);
    this.stage = Int32Array.from(columns.stage);
    this.microbatch = Int32Array.from(columns.microbatch);
    this.fromRank = Int32Array.from(columns.from_rank);
    this.fromPosition = Int32Array.from(columns.from_position, (difference, k) => difference + k);
    this.start = new Int32Array(n);
    this.end = new Int32Array(n);
    this.made = new Int32Array(n);
    this.styles = []; // the positions of each kind, those of the rank's first stage and of later ones apart
    for (let k = 0, now = 0; k < n; k++) {
      this.start[k] = now += columns.gap[k];
      this.end[k] = now += columns.length[k];
      this.made[k] = this.start[k] - columns.made[k];
    }
  }

  // The positions by style: 2 · kind + whether the stage is a later one of its rank; of vocabulary stages S, T.
  styled(stages, vocabulary) {
    if (!this.styles.length) {
      const first = stages.find((stage) => !vocabulary.has(stage));
      this.styles = Array.from({ length: 10 }, () => []);
      this.style = new Uint8Array(this.n);
      for (let k = 0; k < this.n; k++) {
        const style = vocabulary.has(this.stage[k])
          ? this.kind[k]
            ? T
            : S
          : 2 * this.kind[k] + (this.stage[k] !== first);
        this.styles[style].push(k);
        this.style[k] = style;
      }
    }
    return this.styles;
  }

  // The last op that starts at or before a tick; -1 before the first.
  at(tick) {
    let low = 0,
      high = this.n;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.start[middle] <= tick) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }
}

// All ranks' ops, of the predicted or of the measured step.
class Layer {
  constructor(name, data, kinds) {
    Object.assign(this, { name, data, kinds, seconds: data.seconds });
    this.tracks = data.ranks.map((columns, rank) => new Track(columns, rank));
    this.end = Math.max(...this.tracks.map((t) => (t.n ? t.end[t.n - 1] : 0)));
    this.places = new Map(); // "F2.5" -> [rank, position]; a BW is also the B and the W in it
    for (const t of this.tracks)
      for (let k = 0; k < t.n; k++) {
        for (const phase of PHASES_OF[t.kind[k]])
          this.places.set(`${phase}${t.stage[k]}.${t.microbatch[k]}`, [t.rank, k]);
        this.places.set(this.nameOf(t.rank, k), [t.rank, k]);
      }
  }

  nameOf(rank, k) {
    const t = this.tracks[rank];
    return `${this.kinds[t.kind[k]]}${t.stage[k]}.${t.microbatch[k]}`;
  }

  // The share of the step in which a rank computes.
  busy(rank) {
    return this.data.busy[rank] / this.seconds;
  }

  // The gap before op k of a rank; k may be the number of ops, for what is left of the step.
  gap(rank, k) {
    const t = this.tracks[rank];
    return [k ? t.end[k - 1] : 0, k < t.n ? t.start[k] : this.end];
  }
}

class Model {
  constructor(data) {
    Object.assign(this, data);
    this.data = data;
    this.ranks = data.head.ranks;
    this.predicted = new Layer("predicted", data.predicted, data.names.kinds);
    this.measured = data.measured && new Layer("measured", data.measured, data.names.kinds);
    this.layers = [this.measured, this.predicted].filter(Boolean);
    this.end = Math.max(
      ...this.layers.map((layer) => layer.end),
      ...data.predicted.exchanges.flat().map((x) => x[2] + x[3]),
      ...data.predicted.updates.map(([start, length]) => (length ? start + length : 0)),
    );
    this.passed = data.predicted.passed.map((rows) => new Map(rows.map((row) => [row[0], row])));
    this.into = new Map();
    this.outOf = new Map();
    this.sentBytes = new Map(); // "op stage" -> bytes of the op's result that the stage receives
    for (const edge of data.edges) {
      for (const [, , bytes, op] of edge.values || []) {
        const key = `${op} ${edge.target.replace(/\D+/, "")}`;
        this.sentBytes.set(key, (this.sentBytes.get(key) || 0) + bytes);
      }
      if (edge.from === edge.to) continue;
      const arrives = edge.target.replace("W", "B"); // what W needs arrives with B
      this.into.set(arrives, [...(this.into.get(arrives) || []), edge]);
      this.outOf.set(edge.source, [...(this.outOf.get(edge.source) || []), edge]);
    }
    this.vocabulary = new Set(data.head.vocabulary);
    this.stagesOf = Array.from({ length: this.ranks }, () => []);
    data.head.placement.forEach((rank, stage) => this.stagesOf[rank].push(stage));
    this.peaks = this.memory.map((_, rank) => peakOf(memoryOf(this, rank)).bytes); // with AdamW's state
  }

  seconds(ticks) {
    return ticks * this.tick;
  }

  time(ticks) {
    return secondsText(this.seconds(ticks));
  }

  // The messages of an op: {edge, op: the name of the op at the other end}.
  messages(layer, rank, k, incoming) {
    const t = layer.tracks[rank],
      m = t.microbatch[k];
    return PHASES_OF[t.kind[k]].flatMap((phase) =>
      ((incoming ? this.into : this.outOf).get(`${phase}${t.stage[k]}`) || []).map((edge) => {
        const place = layer.places.get(
          `${(incoming ? edge.source : edge.target).replace(incoming ? "" : "W", incoming ? "" : "B")}.${m}`,
        );
        return { edge, place };
      }),
    );
  }

  // The ops of a microbatch on all ranks, in order of time: [rank, position].
  course(layer, microbatch) {
    const found = [];
    for (const t of layer.tracks)
      for (let k = 0; k < t.n; k++) if (t.microbatch[k] === microbatch) found.push([t.rank, k]);
    return found.sort((a, b) => layer.tracks[a[0]].start[a[1]] - layer.tracks[b[0]].start[b[1]]);
  }

  modules(stage) {
    const { first, last, vocabulary } = this.stages[stage];
    if (vocabulary) return "a share of a vocabulary layer";
    return first === last ? first || "(the model itself)" : `${first} … ${last}`;
  }
}
