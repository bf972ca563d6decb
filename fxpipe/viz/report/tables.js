// The parts of the report that are tables: stages, links, measured against predicted, about.
"use strict";

function stagesTab(model, host) {
  const { stages } = model,
    phases = ["forward", "backward", "weight"],
    most = Math.max(...stages.map((s) => phases.reduce((sum, p) => sum + s[p], 0)));
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0),
    mean = sum(stages.map((s) => sum(phases.map((p) => s[p])))) / stages.length;
  const rows = stages.map((s) => {
    const total = sum(phases.map((p) => s[p]));
    return [
      s.stage,
      s.rank,
      model.modules(s.stage),
      countText(s.parameters),
      s.flops ? flopsText(sum(s.flops)) : "?",
      ...phases.map((p) => secondsText(s[p])),
      el(
        "div",
        { class: "cell" },
        bar(
          phases.map((p, k) => ({ share: s[p] / most, class: "FBW"[k], title: `${"FBW"[k]} ${secondsText(s[p])}` })),
        ),
        el("span", { class: "soft" }, percent(total / mean)),
      ),
      bytesText(s.saved_activations),
      bytesText(s.saved_for_weight),
      s.offloadable || s.offloadable_for_weight ? bytesText(s.offloadable + s.offloadable_for_weight) : "0 B",
    ];
  });
  const { busy } = model.predicted.data,
    longest = Math.max(...busy);
  host.append(
    el("h2", {}, "Stages, of one microbatch"),
    table(
      [
        "stage",
        "rank",
        "modules",
        "parameters",
        "FLOPs",
        "F",
        "B",
        "W",
        "balance (of the mean)",
        "saved F to B",
        "kept for W",
        "offloadable",
      ],
      rows,
      [0, 1, 3, 4, 5, 6, 7, 9, 10, 11],
    ),
    el("h2", {}, "Ranks, of a step"),
    table(
      ["rank", "busy", "", "idle", "of it messages on their way", "of it transfers"],
      busy.map((seconds, rank) => [
        rank,
        secondsText(seconds),
        bar([{ share: seconds / model.head.seconds, class: "F", title: "busy" }]),
        `${secondsText(model.head.idle[rank])} (${percent(model.head.idle[rank] / model.head.seconds)})`,
        secondsText(model.head.exposed_communication[rank]),
        secondsText(model.head.stalled[rank] || 0),
      ]),
      [0, 1, 3, 4, 5],
    ),
    el(
      "p",
      { class: "note" },
      `The busiest rank sets the pace: ranks as busy as the mean would be ${percent(longest / (sum(busy) / busy.length) - 1)} faster. ${model.head.bounds}.`,
    ),
    model.head.many_steps && el("p", {}, `Many steps: ${model.head.many_steps}.`),
  );
}

function linksTab(model, host) {
  const { links } = model,
    most = Math.max(1e-30, ...links.messages.map((row) => row[4]));
  host.append(
    el("h2", {}, "Messages between ranks, of a step"),
    links.messages.length
      ? table(
          ["from", "to", "messages", "bytes", "", "seconds in all", "of the step"],
          links.messages.map(([a, b, count, bytes, seconds]) => [
            a,
            b,
            count,
            bytesText(bytes),
            bar([{ share: seconds / most, class: "F" }]),
            secondsText(seconds),
            percent(seconds / model.head.seconds),
          ]),
          [0, 1, 2, 3, 5, 6],
        )
      : el("p", {}, "There are none."),
    el("h2", {}, "Sections that exchange values"),
    table(
      ["from", "to", "ranks", "bytes", "seconds", "values"],
      model.edges.map((e) => [
        e.source,
        e.target,
        e.from === e.to ? `within rank ${e.from}` : `${e.from} to ${e.to}`,
        bytesText(e.bytes),
        secondsText(e.seconds),
        e.values
          ? el(
              "span",
              {},
              e.values.map(([name, shape], k) => [k ? ", " : "", el("code", {}, name), ` ${shape}`]),
            )
          : "not known",
      ]),
      [3, 4],
    ),
  );
  if (links.transfers.some(([out, back]) => out || back))
    host.append(
      el("h2", {}, `Offload to ${model.head.tier}: ${bytesText(links.moved)} in ${numberOf(links.offloads, "transfer")}`),
      table(
        ["rank", "seconds of offloads", "seconds of reloads"],
        links.transfers.map(([out, back], rank) => [rank, secondsText(out), secondsText(back)]),
        [0, 1, 2],
      ),
    );
  if (links.exchanges.some(Boolean))
    host.append(
      el(
        "h2",
        {},
        `Exchanges with the other replicas (${model.head.replicas} in all${model.head.shard ? `, which divide the ${model.head.shard}` : ""})`,
      ),
      table(
        ["rank", "seconds"],
        links.exchanges.map((s, rank) => [rank, secondsText(s)]),
        [0, 1],
      ),
      el("p", {}, `${secondsText(model.head.exposed_exchange)} of them come behind the last op.`),
    );
}

function measuredTab(model, host, events) {
  if (!model.measured) {
    host.append(
      el("h2", {}, "No measured step"),
      el("p", {}, model.unknown.find((line) => line.startsWith("No recorded")) || ""),
    );
    return;
  }
  const wide = Math.max(...model.differences.flatMap((d) => [d.largest, d.expected])),
    pace = model.differences[0].expected / model.differences[0].predicted;
  const rows = model.differences.map((d) => {
    const off = Math.abs(Math.log(d.median / d.expected)) > Math.log(1.15);
    return [
      `${d.kind}${d.stage}`,
      model.modules(d.stage),
      secondsText(d.predicted),
      secondsText(d.expected),
      secondsText(d.median),
      el("span", { class: off ? "off" : "" }, `× ${digits(d.median / d.expected)}${off ? " !" : ""}`),
      `${secondsText(d.least)} to ${secondsText(d.largest)}`,
      el("div", { class: "whisker" }, whisker(d, wide)),
    ];
  });
  const kinds = model.names.kinds.flatMap((kind) => {
    const own = model.differences.filter((d) => d.kind === kind);
    if (!own.length) return [];
    const [expected, measured] = ["expected", "median"].map((by) => own.reduce((sum, d) => sum + d[by], 0));
    return [[kind, own.length, secondsText(expected), secondsText(measured), `× ${digits(measured / expected)}`]];
  });
  const ranks = model.measured.data.busy.map((seconds, rank) => [
    rank,
    secondsText(model.predicted.data.busy[rank]),
    secondsText(seconds),
    percent(model.head.idle[rank] / model.head.seconds),
    percent(1 - seconds / model.measured.seconds),
  ]);
  host.append(
    el(
      "h2",
      {},
      `The step took ${secondsText(model.measured.seconds)}, predicted ${secondsText(model.head.seconds)} (× ${digits(model.measured.seconds / model.head.seconds)})`,
    ),
    el(
      "p",
      {},
      "From the first op's start to the last op's end. ",
      el("button", { onclick: () => events.tab("timeline") }, "Both on one time axis"),
      ` Ops take × ${digits(pace)} the predicted time (the median of the ratios). At that pace they are expected as below; an exclamation mark: more than 15% from it. The largest difference is first.`,
    ),
    table(
      ["op", "modules", "predicted", "expected", "measured (median)", "", "from least to largest", "| expected, ● median"],
      rows,
      [2, 3, 4, 5, 6],
    ),
    el("h2", {}, "Kinds of ops, of one microbatch on all stages"),
    table(["kind", "stages", "expected", "measured (medians)", ""], kinds, [1, 2, 3, 4]),
    el("h2", {}, "Ranks"),
    table(["rank", "busy, predicted", "busy, measured", "idle, predicted", "idle, measured"], ranks, [0, 1, 2, 3, 4]),
    el(
      "p",
      { class: "note" },
      "Ranks' clocks are aligned so that no message arrives before its op began. With fewer processors than ranks, ops take longer than predicted, and gaps are shorter than they seem.",
    ),
  );
}

function whisker(d, wide) {
  const at = (x) => `${(100 * x) / wide}%`,
    line = el("i", { class: "line" }),
    dot = el("i", { class: "dot" }),
    mark = el("i", { class: "mark" });
  Object.assign(line.style, { left: at(d.least), width: at(d.largest - d.least) });
  dot.style.left = at(d.median);
  mark.style.left = at(d.expected);
  return [line, dot, mark];
}

function aboutTab(model, host) {
  const { head } = model,
    facts = {
      model: head.model,
      schedule: head.schedule,
      "costs of the device": head.device || "not said",
      ranks: head.ranks,
      stages: head.stages,
      microbatches: head.microbatches,
      replicas: `${head.replicas}${head.shard ? `, dividing the ${head.shard}` : ""}`,
      lanes: head.lanes,
      recomputed: head.recompute || "nothing",
      "offload to": head.tier || "nothing",
      fxpipe: head.version,
    };
  host.append(
    el("h2", {}, "What this report does not know"),
    el(
      "ul",
      {},
      model.unknown.map((line) => el("li", {}, line)),
    ),
    el("h2", {}, "The pipeline"),
    el(
      "dl",
      {},
      Object.entries(facts).map(([a, b]) => [el("dt", {}, a), el("dd", {}, b)]),
    ),
    el("h2", {}, "How to read it"),
    el(
      "p",
      {},
      "Predicted times are those of the simulator: an op begins when the op before it on its rank is over and its values have arrived. A message is a delay; links between ranks carry any number of messages at a time. Memory is what a rank holds between ops.",
    ),
    el(
      "p",
      { class: "note" },
      "Drawn with uPlot and dagre (MIT licenses), which are in this file, and nothing from the network.",
    ),
  );
}
