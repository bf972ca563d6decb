// The parts of the report that are tables: stages, links, measured against predicted, candidates, about.
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
  const busy = model.head.busy,
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
      `The busiest rank sets the pace: ranks as busy as the mean would be ${percent(longest / (sum(busy) / busy.length) - 1)} faster. No schedule of this placement takes less than ${secondsText(model.head.lower_bound)}; this one takes ${secondsText(model.head.seconds)}.`,
    ),
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
      el("h2", {}, `Offload to ${model.head.tier}: ${bytesText(links.moved)} in ${links.offloads} transfers`),
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
  const wide = Math.max(...model.differences.flatMap((d) => [d.largest, d.predicted]));
  const rows = model.differences.map((d) => {
    const off = Math.abs(Math.log(d.median / d.predicted)) > Math.log(1.15);
    return [
      `${d.kind}${d.stage}`,
      model.modules(d.stage),
      secondsText(d.predicted),
      secondsText(d.median),
      el("span", { class: off ? "off" : "" }, `× ${digits(d.median / d.predicted)}${off ? " !" : ""}`),
      `${secondsText(d.least)} to ${secondsText(d.largest)}`,
      el("div", { class: "whisker" }, whisker(d, wide)),
    ];
  });
  const ranks = model.measured.data.busy.map((seconds, rank) => [
    rank,
    secondsText(model.head.busy[rank]),
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
      " An exclamation mark: more than 15 % from the prediction.",
    ),
    table(
      ["op", "modules", "predicted", "measured (median)", "", "from least to largest", "| predicted, ● median"],
      rows,
      [2, 3, 4, 5],
    ),
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
  mark.style.left = at(d.predicted);
  return [line, dot, mark];
}

// Better in one of memory and time, and no worse in the other, than all others.
function frontierOf(points) {
  const found = [];
  for (const p of [...points].sort((a, b) => a.peak_memory - b.peak_memory || a.seconds - b.seconds))
    if (!found.length || p.seconds < found.at(-1).seconds) found.push(p);
  return found;
}

// The candidate that the plan is: of its schedule, and nearest to its step.
function chosenOf(model, points) {
  const off = (c) => Math.abs(c.seconds - model.head.seconds) + (c.schedule === model.head.schedule ? 0 : 1e9);
  return points.reduce((a, b) => (off(b) < off(a) ? b : a));
}

function candidatesTab(model, host) {
  const all = model.candidates,
    points = all.filter((c) => c.seconds !== null);
  if (!points.length) {
    host.append(
      el("h2", {}, "No other candidates"),
      el(
        "p",
        {},
        'The schedule was named. Compile with schedule="auto" to have all families tried; fxpipe compare simulates them on the costs of a saved pipeline.',
      ),
    );
    return;
  }
  const best = frontierOf(points),
    chosen = chosenOf(model, points);
  const name = (c) =>
    [
      c.schedule,
      `${c.stages_per_rank} a rank`,
      c.placement,
      c.barriers ? `vocabulary ${c.barriers}-barrier` : "",
      c.recompute && `recompute ${c.recompute}`,
      c.offloaded && "offload",
    ]
      .filter(Boolean)
      .join(", ");
  const plot = el("div", { class: "plot" });
  const steps = best
    .slice(1)
    .map((c, k) =>
      el(
        "li",
        {},
        `${bytesText(c.peak_memory - best[k].peak_memory)} more memory buys ${percent(1 - c.seconds / best[k].seconds)} of the step: `,
        el("b", {}, name(best[k])),
        " → ",
        el("b", {}, name(c)),
      ),
    );
  const rows = [...all]
    .sort((a, b) => (a.seconds ?? Infinity) - (b.seconds ?? Infinity))
    .map((c) =>
      el(
        "tr",
        { class: c === chosen ? "chosen" : null },
        [
          c === chosen ? "chosen" : best.includes(c) ? "frontier" : "",
          name(c),
          c.seconds === null ? "left out" : secondsText(c.seconds),
          c.span_bubble === null ? "" : percent(c.span_bubble),
          c.peak_memory === null ? "" : bytesText(c.peak_memory),
          c.why,
        ].map((x, k) => el("td", { class: k > 1 && k < 5 ? "n" : null }, x)),
      ),
    );
  host.append(
    el("h2", {}, `All ${all.length} candidates: bubble against memory`),
    plot,
    el(
      "p",
      { class: "note" },
      "A dot is a candidate; the line joins those than which no other is faster with as little memory.",
    ),
    el("h2", {}, "What more memory buys"),
    steps.length
      ? el("ul", {}, steps)
      : el("p", {}, "Nothing among these candidates: the fastest also needs the least memory."),
    el("h2", {}, "The candidates, fastest first"),
    table(["", "candidate", "step", "span bubble", "peak memory", "why it was left out"], rows, [2, 3, 4]),
  );
  drawCandidates(plot, points, best, chosen, name);
}

function drawCandidates(host, points, best, chosen, name) {
  const sorted = [...points].sort((a, b) => a.peak_memory - b.peak_memory),
    tip = el("p", { class: "soft" }, "Point at a candidate for its name.");
  const make = () =>
    new uPlot(
      {
        width: Math.max(320, host.clientWidth || 700),
        height: 320,
        padding: [10, 20, 0, 0],
        legend: { show: false },
        scales: {
          x: { time: false, range: (u, low, high) => [0, high * 1.08] },
          y: { range: (u, low, high) => [0, high * 1.15 || 1] },
        },
        series: [
          {},
          {
            label: "candidates",
            stroke: () => color("soft"),
            paths: () => null,
            points: { show: true, size: 7, fill: () => color("page") },
          },
          {
            label: "frontier",
            stroke: () => color("F"),
            width: 2,
            spanGaps: true,
            points: { show: true, size: 9, fill: () => color("F") },
          },
        ],
        axes: [
          {
            stroke: () => color("soft"),
            grid: { stroke: () => color("grid") },
            label: "peak memory of the fullest rank",
            splits: (u, a, low, high) => byteTicks(high),
            values: (_, t) => t.map(bytesText),
            space: 90,
          },
          {
            size: 60,
            stroke: () => color("soft"),
            grid: { stroke: () => color("grid") },
            label: "span bubble",
            values: (_, t) => t.map((x) => percent(x)),
          },
        ],
        cursor: { drag: { x: false, y: false } },
        hooks: {
          setCursor: [
            (u) => {
              if (u.cursor.idx !== null && u.cursor.left >= 0) {
                const c = sorted[u.cursor.idx];
                tip.textContent = `${name(c)}: step ${secondsText(c.seconds)}, bubble ${percent(c.span_bubble)}, ${bytesText(c.peak_memory)}`;
              }
            },
          ],
          draw: [
            (u) => {
              const x = u.valToPos(chosen.peak_memory, "x", true),
                y = u.valToPos(chosen.span_bubble, "y", true),
                r = 9 * devicePixelRatio;
              u.ctx.strokeStyle = color("select");
              u.ctx.lineWidth = 2 * devicePixelRatio;
              u.ctx.beginPath();
              u.ctx.arc(x, y, r, 0, 7);
              u.ctx.stroke();
              u.ctx.fillStyle = color("ink");
              u.ctx.font = `${11 * devicePixelRatio}px system-ui`;
              u.ctx.textAlign = "left";
              u.ctx.fillText(`chosen: ${chosen.schedule}`, x + r * 1.4, y);
            },
          ],
        },
      },
      [
        sorted.map((c) => c.peak_memory),
        sorted.map((c) => c.span_bubble),
        sorted.map((c) => (best.includes(c) ? c.span_bubble : null)),
      ],
      host,
    );
  host.shown = () => {
    if (!host.plot) {
      host.plot = make();
      host.after(tip);
    }
  };
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
