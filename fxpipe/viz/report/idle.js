// Why a rank is idle: the inspector's text about a gap.
"use strict";

// What a rank waits for before op k, in a line; "" if it does not wait.
function waitText(model, layer, rank, k) {
  const t = layer.tracks[rank],
    [from, until] = layer.gap(rank, k);
  if (until <= from) return "";
  if (k >= t.n) return "has no more ops";
  const what = t.cause[k];
  if (what === MESSAGE && t.fromRank[k] === rank)
    return `waits for what its lanes exchange behind ${layer.nameOf(rank, t.fromPosition[k])}`;
  if (what === MESSAGE) return `waits for ${layer.nameOf(t.fromRank[k], t.fromPosition[k])} of rank ${t.fromRank[k]}`;
  if (what === TRANSFER) return `waits for ${t.transfer[k]}`;
  if (what === EXCHANGE) return "waits for parameters from the other replicas";
  return layer.name === "measured" ? "runtime, or a message on its way" : "waits";
}

const OTHER_REASONS = { [TRANSFER]: "offloads and reloads", [EXCHANGE]: "exchanges with the other replicas" };

class GapInspector {
  constructor(model, host, events) {
    Object.assign(this, { model, host, events });
  }

  put(title, ...parts) {
    fill(this.host, el("h2", {}, title), parts);
    this.host.classList.add("answer");
    this.host.scrollTop = 0;
  }

  opLink(layer, rank, k, text = layer.nameOf(rank, k)) {
    return el("button", { class: "op", onclick: () => this.events.select({ layer, rank, k, gap: false }) }, text);
  }

  gap({ layer, rank, k }) {
    const { model } = this,
      t = layer.tracks[rank],
      [from, until] = layer.gap(rank, k),
      parts = [];
    const say = (...words) => parts.push(el("p", {}, words));
    say(
      `From ${model.time(from)} to ${model.time(until)}: `,
      el("b", {}, model.time(until - from)),
      layer.name === "measured" ? ", measured" : ", predicted",
      ".",
    );
    if (k < t.n) say("The next op in its order is ", this.opLink(layer, rank, k), ".");
    if (k >= t.n) {
      const last = layer.tracks.map((x, r) => [x.n ? x.end[x.n - 1] : 0, r]).sort((a, b) => b[0] - a[0])[0];
      say(
        "The rank has no more ops in this step. ",
        last[0] <= from
          ? ""
          : [
              "The last op of all is ",
              this.opLink(layer, last[1], layer.tracks[last[1]].n - 1),
              ` on rank ${last[1]}.`,
            ],
      );
      const [start, length] = layer.name === "predicted" ? model.predicted.data.updates[rank] : [0, 0];
      if (length) say(`The optimizer's update (O) is predicted from ${model.time(start)} to ${model.time(start + length)}.`);
    } else if (t.cause[k] === MESSAGE) this.why(layer, rank, k, from, until, say);
    else if (t.cause[k] === TRANSFER)
      say(
        `It waits for the ${t.transfer[k]}: the link to the ${model.head.tier || "offload store"} is not done with it. More time between the two, or less to move, would help (docs/offload.md).`,
      );
    else if (t.cause[k] === EXCHANGE)
      say(
        "It waits for the stage's parameters, which the other replicas have parts of. The exchange stands in the thin row below the rank.",
      );
    else
      say(
        "All its values were there: the time goes to the runtime, to a message on its way (whose arrival is not recorded), or to a busy processor.",
      );
    if (layer.name === "predicted") this.order(rank, k, say);
    if (k < t.n) this.chain(layer, rank, k, parts);
    this.put(
      k < t.n && until > from ? `Rank ${rank} ${waitText(model, layer, rank, k)}` : `Rank ${rank} is idle`,
      parts,
    );
  }

  // All gaps of a rank, by what it waits for, and the longest of them.
  rank(layer, rank) {
    const { model } = this,
      t = layer.tracks[rank],
      gaps = [],
      sums = new Map();
    for (let k = 0; k <= t.n; k++) {
      const [from, until] = layer.gap(rank, k);
      if (until <= from) continue;
      gaps.push([until - from, k]);
      const why = this.reason(layer, rank, k, from, until);
      for (const [text, ticks] of why) sums.set(text, (sums.get(text) || 0) + ticks);
    }
    const all = gaps.reduce((sum, [ticks]) => sum + ticks, 0),
      gapLink = (k) =>
        el(
          "button",
          { class: "op", onclick: () => this.events.select({ layer, rank, k, gap: true }, true) },
          waitText(model, layer, rank, k),
        );
    gaps.sort((a, b) => b[0] - a[0]);
    this.put(
      `Why rank ${rank} is idle`,
      el(
        "p",
        {},
        el("b", {}, model.time(all)),
        ` of ${model.time(layer.end)}, ${percent(all / layer.end)}, ${layer.name}. It waits`,
      ),
      table(
        ["for", "in all"],
        [...sums].sort((a, b) => b[1] - a[1]).map(([text, ticks]) => [text, model.time(ticks)]),
        [1],
      ),
      el("h3", {}, "The longest gaps"),
      el(
        "ol",
        { class: "course" },
        gaps.slice(0, 8).map(([ticks, k]) => el("li", {}, gapLink(k), " ", el("span", { class: "n" }, model.time(ticks)))),
      ),
      el("button", { onclick: () => this.events.live(rank, null) }, "What is live at its peak?"),
    );
  }

  // The three largest losses of a step, over all ranks, each with its longest gap.
  largest(layer) {
    const losses = new Map();
    layer.tracks.forEach((t, rank) => {
      for (let k = 0; k <= t.n; k++) {
        const [from, until] = layer.gap(rank, k);
        if (until <= from) continue;
        for (const [text, ticks] of this.reason(layer, rank, k, from, until, "ops of other ranks")) {
          const loss = losses.get(text) || { text, ticks: 0, most: 0 };
          loss.ticks += ticks;
          if (ticks > loss.most) Object.assign(loss, { most: ticks, gap: { layer, rank, k, gap: true } });
          losses.set(text, loss);
        }
      }
    });
    const all = layer.end * layer.tracks.length,
      found = [...losses.values()].sort((a, b) => b.ticks - a.ticks),
      lost = found.reduce((sum, { ticks }) => sum + ticks, 0);
    if (!lost) return el("p", {}, "No rank waits.");
    const item = ({ text, ticks, gap }) =>
      el(
        "li",
        {},
        el("b", {}, percent(ticks / all)),
        ` for ${text}; the longest gap: `,
        el("button", { class: "op", onclick: () => this.events.select(gap) }, `rank ${gap.rank}`),
      );
    return [
      el("h3", {}, `What the ${layer.name} step loses`),
      el("p", {}, `Ranks wait ${percent(lost / all)} of its time${found.length > 3 ? ", mostly" : ""}`),
      el("ol", { class: "course" }, found.slice(0, 3).map(item)),
    ];
  }

  // What the time of a gap goes to: [text, ticks] of each part.  whose: the ops that it waits for.
  reason(layer, rank, k, from, until, whose = `ops of rank ${layer.tracks[rank].fromRank[k]}`) {
    const t = layer.tracks[rank];
    if (k >= t.n) return [["the others, behind its last op", until - from]];
    if (t.cause[k] !== MESSAGE) return [[OTHER_REASONS[t.cause[k]] || "the runtime, or messages on their way", until - from]];
    const computing = clamp(t.made[k] - from, 0, until - from),
      parts = [[`${whose}${k ? "" : ", before its first op"}`, computing]];
    return [...parts, ["messages on their way", until - from - computing]].filter(([, ticks]) => ticks > 0);
  }

  why(layer, rank, k, from, until, say) {
    const { model } = this,
      t = layer.tracks[rank],
      r = t.fromRank[k],
      i = t.fromPosition[k],
      made = t.made[k];
    const computing = Math.max(0, Math.min(made, until) - from);
    say("It needs what ", this.opLink(layer, r, i), ` of rank ${r} sends.`);
    if (layer.name === "measured")
      say(
        `${made >= until ? "Its rank sent it at the end of that op, whose record ends later, where the rank waits next" : made > from ? `That op was over ${model.time(made - from)} after the gap began; the rest is the message's way and the runtime` : "That op was over before the gap began; the gap is the message's way and the runtime"}.`,
      );
    else
      say(
        computing
          ? [el("b", {}, model.time(computing)), ` of the gap that op has not ended, `]
          : "That op was over before the gap began: ",
        el("b", {}, model.time(until - Math.max(made, from))),
        " the message is on its way.",
      );
    const edges = model
      .messages(layer, rank, k, true)
      .filter(({ place }) => place && place[0] === r && place[1] === i);
    for (const { edge } of edges)
      say(
        "The message: ",
        (edge.values || []).map(([name, shape, bytes], j) => [
          j ? ", " : "",
          el("code", {}, name),
          ` ${shape}, ${bytesText(bytes)}`,
        ]),
        edge.values ? "" : bytesText(edge.bytes),
        ".",
      );
  }

  // Whether another op could have filled the gap.
  order(rank, k, say) {
    const { model } = this,
      found = model.passed[rank].get(k);
    if (!found) {
      if (k < model.predicted.tracks[rank].n)
        say("No other op of the rank was ready, so no other order of this rank alone could fill the gap.");
      return;
    }
    const [, other, ready, live, above] = found,
      peak = model.head.peak_memory[rank];
    say(
      el("b", {}, above ? "Memory: " : "Order: "),
      this.opLink(model.predicted, rank, other),
      ` was ready from ${model.time(ready)} on, and stands later in the rank's order. `,
      above
        ? `Begun here it would hold ${bytesText(live)} of activations, above this schedule's ${bytesText(peak)} on the rank: with a larger memory limit it could fill the gap.`
        : `There was memory for it (${bytesText(live)} of ${bytesText(peak)}); begun here, it may delay what comes behind it.`,
    );
  }

  // From cause to cause, back to a rank that was busy.
  chain(layer, rank, k, parts) {
    const steps = [];
    let at = [rank, k];
    for (let guard = 0; guard < 400 && steps.length < 7; guard++) {
      const t = layer.tracks[at[0]],
        i = at[1];
      if (t.cause[i] === MESSAGE) {
        const next = [t.fromRank[i], t.fromPosition[i]];
        steps.push(
          el("li", {}, this.opLink(layer, ...at), " waited for ", this.opLink(layer, ...next), ` of rank ${next[0]}`),
        );
        at = next;
      } else {
        let first = i;
        while (first > 0 && layer.tracks[at[0]].cause[first] === 0) first--;
        if (first === i) break;
        steps.push(
          el(
            "li",
            {},
            `rank ${at[0]} ran ${i - first === 1 ? "an op" : `${i - first} ops`} before `,
            this.opLink(layer, ...at),
            ", back to ",
            this.opLink(layer, at[0], first),
          ),
        );
        at = [at[0], first];
      }
    }
    if (steps.length > 1)
      parts.push(el("h3", {}, "And that, from cause to cause"), el("ol", { class: "course" }, steps));
  }
}
