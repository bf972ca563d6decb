// The inspector: one op, one idle gap (idle.js), or what is live at a moment.
"use strict";

class Inspector extends GapInspector {
  constructor(model, host, events) {
    super(model, host, events);
    this.empty();
  }

  empty() {
    const key = (keys, what) => el("tr", {}, el("td", {}, el("kbd", {}, keys)), el("td", {}, what));
    const { events } = this,
      ask = (text, act) => el("button", { onclick: act }, text);
    this.put(
      "Choose an op or an idle gap",
      el(
        "p",
        {},
        "An op shows its microbatch on its way through all ranks, its messages and its line of the program; an idle gap what the rank waits for. Below a rank's name are the share of the step in which it computes, and its peak memory with AdamW's state.",
      ),
      this.largest(this.model.layers[0]),
      el("h3", {}, "Questions"),
      el("p", {}, ask(`Why is rank ${this.idlest()} idle?`, () => events.idle(this.idlest())), " or a click on a rank's name"),
      el("p", {}, ask("What is live at the peak?", () => events.live(this.fullest(), null)), " or a click on the memory"),
      el("p", {}, ask("Where do measured times differ?", () => events.tab("measured"))),
      el(
        "p",
        {},
        el("b", {}, "Where does a NaN come from? "),
        el("code", {}, 'pipe.step(batch, check="finite")'),
        ", with the batch of that step, names the op, its module and its microbatch; search for them above.",
      ),
      el("h3", {}, "Keys"),
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
    this.host.classList.remove("answer");
  }

  idlest() {
    const { idle } = this.model.head;
    return idle.indexOf(Math.max(...idle));
  }

  fullest() {
    const { peaks } = this.model;
    return peaks.indexOf(Math.max(...peaks));
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
      el("p", { class: "note" }, "With the state of AdamW for the optimizer's; without what one op needs while it runs."),
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
