// The candidates of a search: step against memory, and what more memory buys.
"use strict";

// Better in one of memory and time, and no worse in the other, than all others.
function frontierOf(points) {
  const found = [];
  for (const p of [...points].sort((a, b) => a.peak_memory - b.peak_memory || a.compared - b.compared))
    if (!found.length || p.compared < found.at(-1).compared) found.push(p);
  return found;
}

// The candidate that the plan is: of its schedule, and nearest to its step.
function chosenOf(model, points) {
  const off = (c) => Math.abs(c.seconds - model.head.seconds) + (c.schedule === model.head.schedule ? 0 : 1e9);
  return points.reduce((a, b) => (off(b) < off(a) ? b : a));
}

function candidatesTab(model, host) {
  const all = model.candidates.map((c) => ({ ...c, compared: c.period ?? c.seconds })),
    many = all.some((c) => c.period !== null),
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
      `${c.schedule} x ${c.stages_per_rank}`, // stages a rank
      c.placement === "plain" ? "" : c.placement,
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
        `${bytesText(c.peak_memory - best[k].peak_memory)} more memory buys ${percent(1 - c.compared / best[k].compared)} of the step: `,
        el("b", {}, name(best[k])),
        " → ",
        el("b", {}, name(c)),
      ),
    );
  const beyond = beyondLimit(all, chosen),
    limited = model.head.limit !== null,
    gains = beyond.filter((c) => c.gain > 0.0005);
  const rows = [...all]
    .sort((a, b) => (a.compared ?? Infinity) - (b.compared ?? Infinity))
    .map((c) =>
      el(
        "tr",
        { class: c === chosen ? "chosen" : null },
        [
          c === chosen ? "chosen" : best.includes(c) ? "frontier" : "",
          name(c),
          c.seconds === null
            ? "left out"
            : secondsText(c.seconds) + (many && c.period !== null ? `, of many ${secondsText(c.period)}` : ""),
          c.span_bubble === null ? "" : bubbleText(c.span_bubble),
          c.peak_memory === null ? "" : bytesText(c.peak_memory),
          c.why,
        ].map((x, k) => el("td", { class: k > 1 && k < 5 ? "n" : null }, x)),
      ),
    );
  host.append(
    el("h2", {}, `All ${numberOf(all.length, "candidate")}: step against memory`),
    plot,
    el(
      "p",
      { class: "note" },
      "A dot is a candidate; the line joins those than which no other is faster with as little memory. Behind the limit are those that it left out. x 2: two stages a rank; v: placed down the ranks and back.",
    ),
    el("h2", {}, "What more memory buys"),
    steps.length
      ? el("ul", {}, steps)
      : el("p", {}, "Nothing among the candidates that fit: the fastest also needs the least memory."),
    ...(limited
      ? [el("h2", {}, "What a higher limit buys"), higherLimit(gains, beyond, name), el("p", {}, `${model.head.bounds}.`)]
      : []),
    el("h2", {}, "The candidates, fastest first"),
    table(["", "candidate", "step", "span bubble", "activations", "why it was left out"], rows, [2, 3, 4]),
  );
  drawCandidates(plot, points, best, chosen, name, many, beyond, model.head.limit);
}

// The candidates that the limit left out, by the memory that it lacks; gain: of the chosen one's step.
function beyondLimit(all, chosen) {
  if (chosen.period !== null) return []; // compared by a step of many, which is not simulated here
  return all
    .filter((c) => c.beyond)
    .map((c) => ({ ...c, ...c.beyond, offloaded: chosen.offloaded, compared: c.beyond.seconds, gain: 1 - c.beyond.seconds / chosen.seconds }))
    .sort((a, b) => a.more - b.more || a.compared - b.compared);
}

function higherLimit(gains, beyond, name) {
  const best = frontierOf(gains.map((c) => ({ ...c, peak_memory: c.more })));
  if (!beyond.length)
    return el("p", {}, "Not known: no candidate of the plan's own stages and recomputation was left out for its memory.");
  if (!best.length)
    return el("p", {}, `Nothing: ${numberOf(beyond.length, "candidate")} of the plan's own stages that the limit left out would be no faster.`);
  const items = best.map((c) =>
    el("li", {}, `+ ${bytesText(c.more)} on each rank: `, el("b", {}, name(c)), `, ${percent(c.gain)} faster`),
  );
  items.push(el("li", {}, `beyond + ${bytesText(best.at(-1).more)} nothing, of families that are not searched, with the stages of the plan`));
  return el("ul", {}, items);
}

function drawCandidates(host, points, best, chosen, name, many, beyond, limit) {
  const sorted = [...points, ...beyond].sort((a, b) => a.peak_memory - b.peak_memory),
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
          y: { range: (u, low, high) => [low - 0.1 * (high - low || low), high + 0.1 * (high - low || low)] },
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
            label: "activations of the fullest rank",
            splits: (u, a, low, high) => byteTicks(high),
            values: (_, t) => t.map(bytesText),
            space: 90,
          },
          {
            size: 70,
            stroke: () => color("soft"),
            grid: { stroke: () => color("grid") },
            label: many ? "a step of many" : "step",
            values: (_, t) => axisTimes(t),
          },
        ],
        cursor: { drag: { x: false, y: false } },
        hooks: {
          setCursor: [
            (u) => {
              if (u.cursor.idx !== null && u.cursor.left >= 0) {
                const c = sorted[u.cursor.idx];
                tip.textContent = `${name(c)}${c.beyond ? ", above the limit" : ""}: step ${secondsText(c.compared)}, bubble ${bubbleText(c.span_bubble)}, ${bytesText(c.peak_memory)} of activations`;
              }
            },
          ],
          draw: [
            (u) => {
              if (limit !== null) {
                const at = u.valToPos(limit, "x", true);
                u.ctx.strokeStyle = color("off");
                u.ctx.lineWidth = devicePixelRatio;
                u.ctx.beginPath();
                u.ctx.moveTo(at, u.bbox.top);
                u.ctx.lineTo(at, u.bbox.top + u.bbox.height);
                u.ctx.stroke();
                u.ctx.fillStyle = color("off");
                u.ctx.font = `${11 * devicePixelRatio}px system-ui`;
                u.ctx.textAlign = "left";
                u.ctx.fillText("limit", at + 4 * devicePixelRatio, u.bbox.top + 12 * devicePixelRatio);
              }
              const x = u.valToPos(chosen.peak_memory, "x", true),
                y = u.valToPos(chosen.compared, "y", true),
                r = 9 * devicePixelRatio;
              u.ctx.strokeStyle = color("select");
              u.ctx.lineWidth = 2 * devicePixelRatio;
              u.ctx.beginPath();
              u.ctx.arc(x, y, r, 0, 7);
              u.ctx.stroke();
              u.ctx.fillStyle = color("ink");
              u.ctx.font = `${11 * devicePixelRatio}px system-ui`;
              u.ctx.textAlign = "center"; // below: what is faster takes more memory, and stands beside it
              u.ctx.fillText(`chosen: ${chosen.schedule}`, x, y + r * 2.2);
            },
          ],
        },
      },
      [
        sorted.map((c) => c.peak_memory),
        sorted.map((c) => c.compared),
        sorted.map((c) => (best.includes(c) ? c.compared : null)),
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
