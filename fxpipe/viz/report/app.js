// Puts the parts together: tabs, keys, what is chosen.
"use strict";

const TABS = [
  ["timeline", "Timeline"],
  ["memory", "Memory"],
  ["graph", "Graph"],
  ["stages", "Stages"],
  ["links", "Links"],
  ["measured", "Measured"],
  ["candidates", "Candidates"],
  ["lengths", "Lengths"], // of a report that was made with samples
  ["about", "About"],
];

class App {
  constructor(model) {
    this.model = model;
    this.tabs = TABS.filter(([id]) => id !== "lengths" || model.lengths);
    if (model.head.decimal) BYTES = [1000, ["B", "kB", "MB", "GB", "TB"]];
    this.rank = 0;
    const events = {
      click: (hit) => (hit.layer ? this.select(hit) : this.idle(hit.rank)),
      idle: (rank) => this.idle(rank),
      rank: () => this.rank,
      range: () => this.timeline.range,
      ranged: () => this.strip?.plot.setScale("x", { min: this.timeline.range[0], max: this.timeline.range[1] }),
      moment: (tick) => this.strip?.say(tick === null ? null : clamp(tick, 0, model.end)),
      select: (selection) => {
        this.tab("timeline");
        this.select(selection, true);
      },
      live: (rank, tick, isPeak) => this.live(rank, tick, isPeak),
      inspect: (title, ...parts) => this.inspector.put(title, ...parts),
      op: (op) => {
        this.tab("graph");
        this.graph.reveal(op);
      },
      stage: (stage) => {
        this.tab("graph");
        this.graph.pick(stage);
      },
      tab: (name) => this.tab(name),
    };
    this.head();
    this.inspector = new Inspector(model, byId("inspector"), events);
    this.tools();
    this.timeline = new Timeline(model, byId("rows"), events);
    this.strip = new MemoryStrip(model, byId("held-head"), byId("held"), events);
    memoryTab(model, byId("memory"), events);
    stagesTab(model, byId("stages"));
    linksTab(model, byId("links"));
    measuredTab(model, byId("measured"), events);
    candidatesTab(model, byId("candidates"));
    if (model.lengths) lengthsTab(model, byId("lengths"));
    aboutTab(model, byId("about"));
    this.search = new Search(model, byId("search"), byId("hits"), events);
    this.events = events;
    new ResizeObserver(() => this.resize()).observe(document.querySelector("main"));
    new ResizeObserver(() => this.strip.resize()).observe(byId("held"));
    addEventListener("keydown", (event) => this.key(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.timeline.colors();
      this.timeline.redraw();
      this.strip.plot.redraw();
    });
    this.tab("timeline");
    this.fromHash();
  }

  head() {
    const { head } = this.model;
    const most = ([bytes, rank]) => `${bytesText(bytes)} (rank ${rank})`;
    fill(document.querySelector("h1"), head.model, el("span", {}, ` ${head.schedule}`));
    const facts = [
      `${numberOf(head.ranks, "rank")}${head.lanes > 1 ? ` of ${head.lanes} lanes` : ""}`,
      head.stages === head.ranks ? "" : `${head.stages} stages`,
      numberOf(head.microbatches, "microbatch"),
      head.replicas > 1 ? `${head.replicas} replicas` : "",
      `step ${secondsText(head.seconds)}, ${head.throughput}`,
      this.model.measured ? `measured ${secondsText(this.model.measured.seconds)}` : "",
      `span bubble ${bubbleText(head.span_bubble)}`,
      `memory${head.lanes > 1 ? " of a lane" : ""} at most ${most(head.memory)}${head.memory_limit ? ` of ${head.memory_limit}` : ""}, with AdamW's state ${most(head.memory_with_adamw)}`,
    ];
    byId("facts").textContent = facts.filter(Boolean).join(" · ");
    byId("tabs").replaceChildren(
      ...this.tabs.map(([id, name], k) =>
        el(
          "button",
          { role: "tab", id: `tab-${id}`, title: `${name} (${k + 1})`, onclick: () => this.tab(id) },
          name,
        ),
      ),
    );
  }

  tools() {
    const toggle = (name, text, title) =>
      el(
        "label",
        { title },
        el("input", {
          type: "checkbox",
          id: `show-${name}`,
          checked: name === "critical",
          onchange: () => this.flip(name, byId(`show-${name}`).checked),
        }),
        text,
      );
    const button = (text, title, act) => el("button", { title, onclick: act }, text);
    fill(
      byId("tools"),
      button("−", "Zoom out (−)", () => this.timeline.zoom(1.6)),
      button("+", "Zoom in (+)", () => this.timeline.zoom(1 / 1.6)),
      button("All", "The whole step (0)", () => this.timeline.show(0, this.model.end)),
      toggle("critical", "critical path", "c"),
      toggle("patterns", "patterns", "p"),
      ["F", "B", "W"].map((kind) => el("span", { class: `box ${kind}` }, kind)),
      el(
        "span",
        { class: "soft" },
        "forward, input gradients, weight gradients; a number is stage.microbatch, or the microbatch" +
          (this.model.head.placement.length > this.model.ranks ? "; muted: a later stage of its rank" : ""),
      ),
      this.model.vocabulary.size
        ? el(
            "span",
            { class: "key" },
            el("span", { class: "box S" }, "S"),
            el("span", { class: "box T" }, "T"),
            el("span", { class: "soft" }, "vocabulary, before and after its barrier"),
          )
        : null,
      this.model.predicted.data.transfers.some((x) => x.length)
        ? [
            el("span", { class: "key" }, swatch("offload"), "offload"),
            el("span", { class: "key" }, swatch("reload"), "reload"),
          ]
        : null,
      this.model.predicted.data.exchanges.some((x) => x.length)
        ? el("span", { class: "key" }, swatch("exchange"), "exchange with the other replicas")
        : null,
      this.model.predicted.data.lane_exchanges.some((x) => x.length)
        ? el("span", { class: "key" }, swatch("exchange"), "exchange between the lanes")
        : null,
      this.model.predicted.data.updates.some((x) => x[1])
        ? el("span", { class: "key" }, swatch("update"), "O: the optimizer's update")
        : null,
    );
  }

  flip(name, on) {
    this.timeline[name] = on;
    this.timeline.redraw();
  }

  tab(name) {
    this.current = name;
    for (const [id] of this.tabs) {
      byId(id).hidden = id !== name;
      byId(`tab-${id}`).setAttribute("aria-selected", id === name);
    }
    byId(`tab-${name}`).scrollIntoView({ block: "nearest", inline: "nearest" }); // on a narrow screen tabs scroll
    if (name === "graph") {
      this.graph ||= new GraphView(this.model, byId("graph-tools"), byId("graph-view"), this.events);
      if (this.graph.drawing) this.graph.fit();
    }
    if (name === "candidates") document.querySelector("#candidates .plot")?.shown();
    byId("inspector").hidden = !["timeline", "graph", "memory"].includes(name);
    this.resize();
  }

  setRank(rank) {
    if (rank !== this.rank) {
      this.rank = rank;
      this.strip.show(rank);
    }
    this.timeline.redraw();
  }

  select(selection, reveal = false) {
    this.timeline.selected = selection;
    this.setRank(selection.rank);
    this.inspector.show(selection);
    if (reveal) this.timeline.reveal(...this.spanOf(selection), selection.rank);
    this.timeline.redraw();
    const { layer, rank, k, gap } = selection;
    history.replaceState(
      null,
      "",
      `#${layer.name === "measured" ? "measured-" : ""}${gap ? `gap=${rank}.${k}` : `op=${layer.nameOf(rank, k)}`}`,
    );
  }

  // Why a rank is idle, in all.
  idle(rank) {
    this.tab("timeline");
    this.timeline.selected = null;
    this.setRank(rank);
    this.timeline.reveal(...this.timeline.range, rank);
    this.inspector.rank(this.model.layers[0], rank);
  }

  spanOf({ layer, rank, k, gap }) {
    return gap ? layer.gap(rank, k) : [layer.tracks[rank].start[k], layer.tracks[rank].end[k]];
  }

  live(rank, tick, isPeak) {
    this.tab("timeline");
    this.setRank(rank);
    if (tick === null) [tick, isPeak] = [this.strip.peak.tick, true];
    this.strip.moment = tick;
    this.strip.plot.redraw(false);
    this.timeline.selected = null;
    this.inspector.live(rank, tick, isPeak);
    this.timeline.reveal(tick, tick, rank);
  }

  // #op=F2.5, #gap=5.12 (rank and position), #measured-op=…, #rank=5, #graph, #zoom=0.2,0.4 (shares of the step)
  fromHash() {
    for (const part of location.hash.slice(1).split("&")) {
      const [name, value = ""] = part.split("="),
        layer = name.startsWith("measured-") ? this.model.measured : this.model.predicted;
      if (this.tabs.some(([id]) => id === name)) this.tab(name);
      if (name === "zoom") this.timeline.show(...value.split(",").map((x) => x * this.model.end));
      const place = /op$/.test(name) && layer?.places.get(value);
      if (place) this.select({ layer, rank: place[0], k: place[1], gap: false }, true);
      const [rank, k] = value.split(".").map(Number);
      if (/gap$/.test(name) && layer?.tracks[rank] && k >= 0)
        this.select({ layer, rank, k: this.gapFrom(layer, rank, k), gap: true }, true);
      if (name === "rank" && +value < this.model.ranks) this.idle(+value);
      if (name === "live" && +value < this.model.ranks) this.live(+value, null);
    }
  }

  key(event) {
    if (
      event.ctrlKey ||
      event.metaKey ||
      event.altKey ||
      (/INPUT|SELECT|TEXTAREA/.test(event.target.tagName) && event.target.type !== "checkbox")
    )
      return;
    const step = 0.15 * (this.timeline.range[1] - this.timeline.range[0]),
      move = (by) => this.timeline.show(...this.timeline.range.map((x) => x + by));
    const acts = {
      "/": () => byId("search").select(),
      "+": () => this.timeline.zoom(1 / 1.6),
      "=": () => this.timeline.zoom(1 / 1.6),
      "-": () => this.timeline.zoom(1.6),
      0: () => this.timeline.show(0, this.model.end),
      ArrowLeft: () => this.walk(-1),
      ArrowRight: () => this.walk(1),
      ArrowUp: () => this.climb(-1),
      ArrowDown: () => this.climb(1),
      a: () => move(-step),
      d: () => move(step),
      g: () => this.gapBefore(),
      f: () => this.follow(),
      c: () => this.press("critical"),
      p: () => this.press("patterns"),
      Escape: () => {
        this.timeline.selected = null;
        this.inspector.empty();
        this.timeline.redraw();
        history.replaceState(null, "", "#");
      },
    };
    const act = acts[event.key] || (this.tabs[event.key - 1] && (() => this.tab(this.tabs[event.key - 1][0])));
    if (!act || (this.current !== "timeline" && /Arrow|^[adgfcp+\-=0]$/.test(event.key))) return;
    act();
    event.preventDefault();
  }

  press(name) {
    const box = byId(`show-${name}`);
    box.checked = !box.checked;
    this.flip(name, box.checked);
  }

  chosen() {
    return this.timeline.selected || { layer: this.model.predicted, rank: this.rank, k: -1, gap: false };
  }

  walk(by) {
    const { layer, rank, k, gap } = this.chosen(),
      next = gap ? (by < 0 ? k - 1 : k) : k + by;
    this.select({ layer, rank, k: clamp(next, 0, layer.tracks[rank].n - 1), gap: false }, true);
  }

  // The op of the next row at the same time.
  climb(by) {
    const now = this.chosen(),
      rows = this.timeline.rows.filter((row) => row.layer),
      i = rows.findIndex((row) => row.layer === now.layer && row.rank === now.rank);
    const row = rows[clamp(i + by, 0, rows.length - 1)],
      [start, end] = now.k < 0 ? this.timeline.range : this.spanOf(now),
      track = row.layer.tracks[row.rank];
    this.select(
      { layer: row.layer, rank: row.rank, k: clamp(track.at((start + end) / 2), 0, track.n - 1), gap: false },
      true,
    );
  }

  // The first op from k on with a gap before it.
  gapFrom(layer, rank, k) {
    const { n } = layer.tracks[rank];
    while (k < n && layer.gap(rank, k)[1] <= layer.gap(rank, k)[0]) k++;
    return Math.min(k, n);
  }

  gapBefore() {
    const { layer, rank, k } = this.chosen();
    for (let i = Math.max(k, 0); i >= 0; i--) {
      const [from, until] = layer.gap(rank, i);
      if (until > from) return this.select({ layer, rank, k: i, gap: true }, true);
    }
  }

  follow() {
    const { layer, rank, k } = this.chosen(),
      t = layer.tracks[rank];
    if (k < 0 || k >= t.n) return;
    if (t.cause[k] === MESSAGE) this.select({ layer, rank: t.fromRank[k], k: t.fromPosition[k], gap: false }, true);
    else this.walk(-1);
  }

  resize() {
    if (this.current === "timeline") this.timeline?.resize();
    if (this.current === "graph" && this.graph.drawing) this.graph.fit();
  }
}

unpack("data").then((data) => {
  window.report = new App(new Model(data));
  document.body.dataset.ready = "1";
});
