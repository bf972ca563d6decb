// The inspector: one op, one idle gap, or what is live at a moment.
"use strict";

// What a rank waits for before op k, in a line; "" if it does not wait.
function waitText(model, layer, rank, k) {
  const t = layer.tracks[rank],
    [from, until] = layer.gap(rank, k);
  if (until <= from) return "";
  if (k >= t.n) return "has no more ops";
  const what = t.cause[k];
  if (what === MESSAGE) return `waits for ${layer.nameOf(t.fromRank[k], t.fromPosition[k])} of rank ${t.fromRank[k]}`;
  if (what === TRANSFER) return `waits for ${t.transfer[k]}`;
  if (what === EXCHANGE) return "waits for parameters from the other replicas";
  return layer.name === "measured" ? "runtime, or a message on its way" : "waits";
}

class Inspector {
  constructor(model, host, events) {
    Object.assign(this, { model, host, events });
    this.empty();
  }

  put(title, ...parts) {
    fill(this.host, el("h2", {}, title), parts);
    this.host.scrollTop = 0;
  }

  opLink(layer, rank, k, text = layer.nameOf(rank, k)) {
    return el("button", { class: "op", onclick: () => this.events.select({ layer, rank, k, gap: false }) }, text);
  }

  empty() {
    const key = (keys, what) => el("tr", {}, el("td", {}, el("kbd", {}, keys)), el("td", {}, what));
    this.put(
      "Choose an op or an idle gap",
      el(
        "p",
        {},
        "An op shows its microbatch on its way through all ranks, its messages and its line of the program; an idle gap what the rank waits for.",
      ),
      el(
        "div",
        { class: "legend" },
        ["F", "B", "W", "BW"].map((kind) =>
          el(
            "p",
            {},
            el("span", { class: `box ${kind}` }, kind),
            { F: "forward", B: "gradients of activations", W: "gradients of weights", BW: "both gradients" }[kind],
          ),
        ),
      ),
      el("table", { class: "keys" }, [
        key("← →", "op before, behind, on the rank"),
        key("↑ ↓", "the op above, below, at that time"),
        key("g", "the idle gap before the op"),
        key("f", "follow: the cause of the wait"),
        key("+ − 0", "zoom in, out, all"),
        key("a d", "move left, right"),
        key("/", "search"),
        key("c", "critical path on, off"),
        key("p", "patterns on, off"),
        key("1 … 8", "parts of the report"),
        key("Esc", "nothing chosen"),
      ]),
    );
  }

  show(selection) {
    if (selection.gap) this.gap(selection);
    else this.op(selection);
  }

  op({ layer, rank, k }) {
    const { model } = this,
      t = layer.tracks[rank],
      name = layer.nameOf(rank, k),
      kind = layer.kinds[t.kind[k]];
    const stage = t.stage[k],
      m = t.microbatch[k],
      other = model.layers.find((x) => x !== layer),
      there = other?.places.get(name);
    const rows = [
      ["stage", `${stage}: ${model.modules(stage)}`],
      ["rank", rank],
      ["microbatch", m],
    ];
    const times = (x, [r, i]) =>
      `${model.time(x.tracks[r].start[i])} to ${model.time(x.tracks[r].end[i])} (${model.time(x.tracks[r].end[i] - x.tracks[r].start[i])})`;
    rows.push([layer.name, times(layer, [rank, k])]);
    if (there) {
      const length = (x, [r, i]) => x.tracks[r].end[i] - x.tracks[r].start[i],
        [measured, predicted] =
          layer.name === "measured"
            ? [length(layer, [rank, k]), length(other, there)]
            : [length(other, there), length(layer, [rank, k])];
      rows.push(
        [other.name, [times(other, there), " ", this.opLink(other, ...there, "show")]],
        ["measured ÷ predicted", digits(measured / predicted)],
      );
    }
    const [from, until] = layer.gap(rank, k);
    rows.push([
      "began",
      until > from
        ? [
            `after ${model.time(until - from)} idle: `,
            el(
              "button",
              { class: "op", onclick: () => this.events.select({ layer, rank, k, gap: true }) },
              waitText(model, layer, rank, k),
            ),
          ]
        : "right behind the op before it",
    ]);
    if (layer.name === "predicted" && model.predicted.data.critical.some(([r, i]) => r === rank && i === k))
      rows.push(["critical path", "yes: the step is as long as this chain of ops"]);
    this.put(
      [el("span", { class: `box ${kind}` }, kind), ` ${name}`],
      el(
        "dl",
        {},
        rows.map(([a, b]) => [el("dt", {}, a), el("dd", {}, b)]),
      ),
      this.messages(layer, rank, k, true),
      this.messages(layer, rank, k, false),
      this.program(rank, kind, stage, m),
      this.kept(stage, kind),
      this.course(layer, m, rank, k),
    );
  }

  messages(layer, rank, k, incoming) {
    const found = this.model.messages(layer, rank, k, incoming);
    if (!found.length) return null;
    return [
      el("h3", {}, incoming ? "Receives" : "Sends"),
      found.map(({ edge, place }) =>
        el(
          "div",
          { class: "message" },
          el(
            "p",
            {},
            place ? [incoming ? "from " : "to ", this.opLink(layer, ...place), ` on rank ${place[0]}`] : null,
            `, ${bytesText(edge.bytes)}, ${secondsText(edge.seconds)}`,
          ),
          edge.values
            ? el(
                "ul",
                {},
                edge.values.map(([name, shape, bytes]) =>
                  el("li", {}, el("code", {}, name), ` ${shape}, ${bytesText(bytes)}`),
                ),
              )
            : el("p", { class: "note" }, "The names of its tensors are not known."),
        ),
      ),
    ];
  }

  program(rank, kind, stage, m) {
    const place = this.model.programs[rank]?.[`${kind}${stage}`];
    if (!place) return [el("h3", {}, "Program"), el("p", { class: "note" }, "Its lines are not known here.")];
    const called = place.calls[m] ? `called in line ${place.calls[m]}` : "called in a loop";
    return [
      el("h3", {}, "Program"),
      el(
        "p",
        {},
        el("code", {}, `rank${rank}.py:${place.line}`),
        `, ${called}`,
        place.section ? [", computes in line ", el("code", {}, place.section)] : "",
      ),
      el("pre", {}, place.text),
    ];
  }

  kept(stage, kind) {
    const cost = this.model.stages[stage],
      rows = keptBy(this.model, stage);
    if (kind !== "F" || !cost.saved_activations) return null;
    return [
      el("h3", {}, `Keeps ${bytesText(cost.saved_activations)} until B, ${bytesText(cost.saved_for_weight)} until W`),
      rows.length ? this.modules(rows) : null,
    ];
  }

  modules(rows) {
    const most = rows[0][1];
    return el(
      "ul",
      { class: "modules" },
      rows
        .slice(0, 12)
        .map(([path, bytes]) =>
          el("li", {}, el("code", {}, path), ` ${bytesText(bytes)}`, bar([{ share: bytes / most, class: "F" }])),
        ),
      rows.length > 12 ? el("li", { class: "note" }, `and ${rows.length - 12} more modules`) : null,
    );
  }

  course(layer, m, rank, k) {
    const places = this.model.course(layer, m);
    return [
      el("h3", {}, `Microbatch ${m} on its way`),
      el(
        "ol",
        { class: "course" },
        places.map(([r, i]) =>
          el(
            "li",
            { class: r === rank && i === k ? "now" : null },
            this.opLink(layer, r, i),
            el("span", { class: "soft" }, ` rank ${r}, ${this.model.time(layer.tracks[r].start[i])}`),
          ),
        ),
      ),
    ];
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

  live(rank, tick, isPeak) {
    const { model } = this,
      found = liveAt(model, rank, tick),
      total = found.reduce((sum, part) => sum + (part.k === RECEIVED ? 0 : part.now), 0);
    const rows = found.map((part) => [
      el(
        "p",
        {},
        swatch(part.key),
        el("b", {}, part.name),
        ` ${bytesText(part.now)}`,
        part.microbatches
          ? ` of ${part.microbatches.length} microbatch${part.microbatches.length === 1 ? "" : "es"}: ${ranges(part.microbatches)}`
          : "",
      ),
      part.k === 0 || part.k === 1
        ? keptBy(model, part.stage).length
          ? el(
              "details",
              { open: part.k === 0 },
              el(
                "summary",
                {},
                part.k ? "by module, of each microbatch, what W reads" : "by module, of each microbatch",
              ),
              this.modules(keptBy(model, part.stage, part.k ? "W" : null)),
            )
          : el("p", { class: "note" }, "Its modules are not known.")
        : null,
    ]);
    this.put(
      `Live on rank ${rank} at ${model.time(tick)}`,
      el(
        "p",
        {},
        isPeak ? "The peak of this rank: " : "",
        el("b", {}, bytesText(total)),
        found.some((p) => p.k === RECEIVED) ? ", and messages that have arrived" : "",
        ".",
      ),
      rows,
      model.memory[rank].pool
        ? el(
            "p",
            {},
            `Beside the device, offloaded activations have a pool of ${bytesText(model.memory[rank].pool)}.`,
          )
        : null,
      el("p", { class: "note" }, "Without the state of the optimizer, and what one op needs while it runs."),
    );
  }
}

// 1, 2, 3, 7 as "1–3, 7".
function ranges(numbers) {
  const found = [];
  for (const n of [...numbers].sort((a, b) => a - b)) {
    if (found.length && found.at(-1)[1] === n - 1) found.at(-1)[1] = n;
    else found.push([n, n]);
  }
  return found.map(([a, b]) => (a === b ? a : `${a}–${b}`)).join(", ");
}
