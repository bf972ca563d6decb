// Steps of samples of many lengths: their distribution, and what it takes to pad or to pack them.
"use strict";

function lengthsTab(model, host) {
  const of = model.lengths,
    able = of.ways.filter((way) => way.seconds !== null),
    best = able.reduce((a, b) => (a && a.seconds <= b.seconds ? a : b), null),
    longest = of.ways[0].seconds === null ? null : of.ways[0];
  const times = (way) => (best && way.seconds !== null ? `× ${digits(way.seconds / best.seconds)}` : "");
  const rows = of.ways.map((way) =>
    el(
      "tr",
      { class: way === best ? "chosen" : null },
      [
        [way.way],
        [digits(way.microbatches), "n"],
        [
          el(
            "div",
            { class: "cell" },
            bar([{ share: way.filled, class: "F", title: "tokens of samples" }]),
            el("span", { class: "num" }, percent(way.filled)),
          ),
        ],
        [way.seconds === null ? "does not fit" : secondsText(way.seconds), "n"],
        [times(way), "n"],
        [way.tokens_per_second === null ? "" : countText(way.tokens_per_second), "n"],
        [way.limit],
      ].map(([x, kind]) => el("td", { class: kind || null }, x)),
    ),
  );
  const whole = of.steps > 1 || of.seed !== undefined;
  host.append(
    el("h2", {}, `${numberOf(of.steps * of.samples, "sample")} of ${of.least} to ${of.longest} tokens, ${digits(of.mean)} on average`),
    el(
      "p",
      { class: "soft" },
      whole
        ? `${numberOf(of.steps, "step")} of ${of.samples} each, drawn from ${of.lengths_of}, seed ${of.seed}`
        : `as given: ${of.lengths_of}`,
    ),
    el(
      "p",
      {},
      el("span", { class: "key" }, el("i", { class: "swatch F" }), "samples"),
      el("span", { class: "key" }, el("i", { class: "swatch B" }), "tokens in them"),
      el("span", { class: "soft" }, "share of all, by the length of the sample"),
    ),
    distribution(of.bars, of.longest),
    el("h2", {}, "What steps of them take"),
    ...(best && longest && best !== longest
      ? [
          el(
            "p",
            {},
            `Padded to the longest, a step takes ${digits(longest.seconds / best.seconds)} times as long as ${best.way}: ${percent(1 - longest.filled)} of its tokens are padding.`,
          ),
        ]
      : []),
    table(
      ["", "microbatches", "filled", "step", "of the fastest", "tokens/s", "limit"],
      rows,
      [1, 3, 4, 5],
    ),
    el(
      "p",
      { class: "note" },
      "Each in its own fastest order, within the memory of the plan. The limit is what keeps the step from being shorter: memory where more of it would make the step more than 1% shorter, else the longest sample where it decides the longest microbatch, else the tokens of a microbatch.",
    ),
    ...(best
      ? [
          el("h2", {}, `Microbatches of the first step, ${best.way}`),
          microbatches(best.first),
          el("p", { class: "note" }, "A bar is as high as its microbatch is long, and as wide as it has rows."),
        ]
      : []),
  );
}

// Two bars for each range of lengths: the share of samples in it, and that of all tokens.
function distribution(bars, longest) {
  const width = 880,
    height = 200,
    sums = [1, 2].map((k) => bars.reduce((sum, row) => sum + row[k], 0)),
    shares = bars.map((row) => [row[1] / sums[0], row[2] / sums[1]]),
    most = Math.max(...shares.flat()),
    each = width / bars.length;
  const parts = shares.flatMap((pair, k) =>
    pair.map((share, which) =>
      svg(
        "rect",
        {
          class: "FB"[which],
          x: k * each + (which ? each / 2 : each * 0.08),
          y: height * (1 - share / most),
          width: each * 0.42,
          height: (height * share) / most,
        },
        svg("title", {}, `up to ${bars[k][0]} tokens: ${numberOf(bars[k][1], "sample")}, ${percent(share)} of the ${which ? "tokens" : "samples"}`),
      ),
    ),
  );
  const every = Math.ceil(bars.length / 12);
  const labels = bars.flatMap(([end], k) =>
    (k + 1) % every ? [] : [svg("text", { x: (k + 1) * each, y: height + 15, "text-anchor": "end" }, `${Math.min(end, longest)}`)],
  );
  const top = svg("text", { x: width, y: -5, "text-anchor": "end" }, `the highest: ${percent(most)}`);
  return svg(
    "svg",
    { class: "bars", viewBox: `0 -16 ${width} ${height + 36}`, role: "img", "aria-label": "Lengths of samples" },
    svg("line", { x1: 0, x2: width, y1: height, y2: height }),
    ...parts,
    ...labels,
    top,
  );
}

function microbatches(first) {
  const width = 880,
    height = 120,
    most = Math.max(...first.map(([, length]) => length)),
    rows = first.reduce((sum, [number]) => sum + number, 0),
    gap = Math.min(3, width / first.length / 4),
    unit = (width - gap * first.length) / rows;
  let x = 0;
  const parts = first.map(([number, length], m) => {
    const tall = (height * length) / most,
      made = svg(
        "rect",
        { class: "F", x, y: height - tall, width: Math.min(unit, 60) * number, height: tall },
        svg("title", {}, `microbatch ${m}: ${number} × ${length}`),
      );
    x += Math.min(unit, 60) * number + gap;
    return made;
  });
  return svg(
    "svg",
    { class: "bars", viewBox: `0 -2 ${width} ${height + 20}`, role: "img", "aria-label": "Microbatches" },
    svg("line", { x1: 0, x2: width, y1: height, y2: height }),
    ...parts,
    svg("text", { x: 0, y: height + 15 }, `longest ${most} tokens`),
  );
}
