// The colored graph: which boxes are open, and what they say.  dagre lays them out.
"use strict";

class GraphView extends Drawing {
  constructor(model, tools, host, events) {
    super();
    Object.assign(this, {
      model,
      graph: model.graph,
      tools,
      host,
      events,
      opened: new Set(),
      phases: new Set(["F"]),
      stage: null,
      view: null,
      found: null,
    });
    if (!this.graph) {
      host.append(
        el(
          "p",
          {},
          model.unknown.find((line) => line.startsWith("No graph")),
        ),
      );
      return;
    }
    const keyed = new Map();
    this.graph.stage.forEach((stage, op) => {
      const key = `${stage}${"FBW"[this.graph.phase[op]]}`;
      if (!keyed.has(key)) keyed.set(key, new Section(this.graph, stage, "FBW"[this.graph.phase[op]]));
      keyed.get(key).ops.push(op);
    });
    this.sections = [...keyed.values()].sort(
      (a, b) => a.stage - b.stage || "FBW".indexOf(a.phase) - "FBW".indexOf(b.phase),
    );
    this.usedBy = this.graph.name.map(() => []);
    this.graph.inputs.forEach((inputs, op) => inputs.forEach((source) => this.usedBy[source].push(op)));
    this.bar();
    this.openTo(28);
    this.listen();
  }

  bar() {
    const stages = el(
      "select",
      { "aria-label": "Stage", onchange: (e) => this.pick(e.target.value === "" ? null : +e.target.value) },
      el("option", { value: "" }, "all stages"),
      this.model.stages.map((s) => el("option", { value: s.stage }, `stage ${s.stage}, rank ${s.rank}`)),
    );
    const phases = ["F", "B", "W"].map((phase) =>
      el(
        "label",
        {},
        el("input", {
          type: "checkbox",
          checked: this.phases.has(phase),
          onchange: (e) => {
            this.phases[e.target.checked ? "add" : "delete"](phase);
            this.reset();
          },
        }),
        el("span", { class: `box ${phase}` }, phase),
      ),
    );
    this.select = stages;
    fill(
      this.tools,
      stages,
      phases,
      el("button", { onclick: () => this.openTo(60) }, "Unfold more"),
      el(
        "button",
        {
          onclick: () => {
            this.opened.clear();
            this.reset();
          },
        },
        "Fold all",
      ),
      el(
        "button",
        {
          onclick: () => {
            this.view = null;
            this.render();
          },
        },
        "Fit",
      ),
      el(
        "span",
        { class: "soft" },
        MARKS.map(([letter, what]) => [el("b", { class: "mark" }, letter), ` ${what}  `]),
      ),
    );
  }

  pick(stage) {
    this.stage = stage;
    this.select.value = stage ?? "";
    if (stage !== null && this.phases.size === 1) this.phases = new Set(["F", "B", "W"]);
    this.bar();
    this.select.value = stage ?? "";
    this.opened.clear();
    this.openTo(28);
  }

  reset() {
    this.view = null;
    this.render();
  }

  roots() {
    return this.sections
      .filter((s) => this.phases.has(s.phase) && (this.stage === null || s.stage === this.stage))
      .map((section) => ({
        id: `${section.stage}${section.phase}`,
        label: `${section.phase}${section.stage}`,
        depth: 0,
        ops: section.ops,
        section,
        root: true,
      }));
  }

  // The items that are seen, with the item around each.
  visible() {
    const leaves = [],
      clusters = [];
    const walk = (item, parent, section) => {
      item = { ...item, section: item.section || section, parent };
      if (item.op !== undefined || !this.opened.has(item.id)) return leaves.push(item);
      clusters.push(item);
      for (const inner of item.section.open(item)) walk(inner, item, item.section);
    };
    for (const root of this.roots()) walk(root, null, root.section);
    return { leaves, clusters };
  }

  // Unfold the item with the most ops, again and again, as long as there are not too many boxes.
  openTo(most) {
    for (;;) {
      const { leaves } = this.visible(),
        groups = leaves.filter(
          (x) => x.op === undefined && !x.members && x.section.open(x).some((y) => y.op === undefined),
        );
      if (!groups.length) break;
      const level = Math.min(...groups.map((x) => x.depth)),
        next = groups.filter((x) => x.depth === level);
      const more = next.reduce((sum, x) => sum + x.section.open(x).length - 1, 0);
      if (leaves.length + more > most) break;
      next.forEach((x) => this.opened.add(x.id));
    }
    this.reset();
  }

  // Unfold all around an op, and choose it.
  reveal(op) {
    const { graph } = this,
      phase = "FBW"[graph.phase[op]];
    this.phases.add(phase);
    if (this.stage !== null && this.stage !== graph.stage[op]) this.stage = graph.stage[op];
    for (let guard = 0; guard < 40; guard++) {
      const leaf = this.visible().leaves.find((x) => x.ops.includes(op));
      if (!leaf || leaf.op !== undefined) break;
      this.opened.add(leaf.id);
    }
    this.found = `op${op}`;
    this.bar();
    this.select.value = this.stage ?? "";
    this.view = null;
    this.render();
    this.center(`op${op}`);
    this.op(op);
  }

  // A value of another stage enters a stage once, where it is used first, and goes on from there.
  edges(leaves) {
    const { graph } = this,
      home = new Map(),
      entered = new Map(),
      found = new Map();
    for (const leaf of leaves) for (const op of leaf.ops) home.set(op, leaf.id);
    for (const leaf of [...leaves].sort((a, b) => "FBW".indexOf(a.section.phase) - "FBW".indexOf(b.section.phase)))
      for (const op of leaf.ops)
        for (const source of graph.inputs[op]) {
          let from = home.get(source);
          if (from && graph.stage[source] !== graph.stage[op]) {
            const key = `${source} ${graph.stage[op]}`;
            if (entered.has(key)) from = entered.get(key);
            else entered.set(key, leaf.id);
          }
          if (!from || from === leaf.id) continue;
          const key = `${from} ${leaf.id}`;
          if (!found.has(key)) found.set(key, { from, to: leaf.id, sources: new Set() });
          found.get(key).sources.add(source);
        }
    return [...found.values()];
  }

  lines(item) {
    const { graph } = this;
    if (item.op !== undefined)
      return [
        graph.name[item.op],
        `${graph.texts[graph.target[item.op]].replace(/^aten\./, "").replace(/\.default$/, "")}  ${graph.texts[graph.shape[item.op]]}`,
      ];
    const flops = item.ops.reduce((sum, op) => sum + graph.flops[op], 0),
      work = `${item.ops.length} op${item.ops.length > 1 ? "s" : ""}${flops ? `, ${flopsText(flops)}` : ""}`;
    if (item.root)
      return [`${item.label}  stage ${item.section.stage}`, this.model.modules(item.section.stage), work];
    return [
      item.members ? `${item.label} … ${item.members.at(-1).label}  (${item.members.length} the same)` : item.label,
      work,
    ];
  }

  marks(item) {
    const bits = item.ops.reduce((all, op) => all | this.graph.marks[op], 0);
    return MARKS.filter((_, k) => bits & (1 << k))
      .map(([letter]) => letter)
      .join(" ");
  }

  render() {
    const { leaves, clusters } = this.visible(),
      g = new dagre.graphlib.Graph({ compound: true });
    g.setGraph({ rankdir: "TB", nodesep: 22, ranksep: 34, marginx: 10, marginy: 10 });
    g.setDefaultEdgeLabel(() => ({}));
    for (const item of clusters) g.setNode(item.id, {});
    for (const item of leaves) {
      const lines = this.lines(item).map((line) =>
          line.length > 46 ? `${line.slice(0, 24)}…${line.slice(-20)}` : line,
        ),
        marks = this.marks(item);
      g.setNode(item.id, {
        item,
        lines,
        marks,
        width: Math.max(lines[0].length * 7 + 44 + 7 * marks.length, ...lines.map((l) => l.length * 6.2 + 18)),
        height: 8 + 15 * lines.length,
      });
    }
    for (const item of [...clusters, ...leaves]) if (item.parent) g.setParent(item.id, item.parent.id);
    const edges = this.edges(leaves);
    for (const edge of edges) {
      const [from, to] = [edge.from, edge.to].map((id) => g.node(id).item.section);
      const kind = from.stage !== to.stage ? "crosses" : from.phase !== to.phase ? "keeps" : "";
      const room = kind && edges.length < 90 ? { width: 56, height: 12, labelpos: "r", labeloffset: 2 } : {};
      g.setEdge(edge.from, edge.to, { edge, kind, ...room });
    }
    dagre.layout(g);
    this.frame(g, clusters, leaves);
    this.draw(g, clusters);
  }

  // An op in the inspector.
  op(op) {
    const { graph } = this,
      t = (column) => graph.texts[graph[column][op]];
    const link = (other) =>
      el(
        "li",
        {},
        el("button", { class: "op", onclick: () => this.reveal(other) }, graph.name[other]),
        el(
          "span",
          { class: "soft" },
          ` ${"FBW"[graph.phase[other]]}${graph.stage[other]} ${graph.texts[graph.shape[other]]}`,
        ),
      );
    const marks = MARKS.filter((_, k) => graph.marks[op] & (1 << k)).map(([, what]) => what);
    const rows = [
      ["op", t("target")],
      ["result", t("shape")],
      ["module", t("path") || "(the model itself)"],
      ["line of the model", t("source") || "not known"],
      [
        "section",
        `${"FBW"[graph.phase[op]]}${graph.stage[op]} on rank ${this.model.head.placement[graph.stage[op]]}`,
      ],
      ["FLOPs", graph.flops[op] ? flopsText(graph.flops[op]) : "none"],
      ["memory", graph.bytes[op] ? bytesText(graph.bytes[op]) : "a view"],
      ["marks", marks.length ? marks.join(", ") : "none: freed in its section"],
    ];
    if (graph.weights[op].length) rows.push(["reads", graph.weights[op].map((k) => graph.texts[k]).join(", ")]);
    this.events.inspect(
      graph.name[op],
      el(
        "dl",
        {},
        rows.map(([a, b]) => [el("dt", {}, a), el("dd", {}, b)]),
      ),
      graph.inputs[op].length ? [el("h3", {}, "Reads"), el("ul", {}, graph.inputs[op].map(link))] : null,
      this.usedBy[op].length
        ? [el("h3", {}, "Is read by"), el("ul", {}, this.usedBy[op].slice(0, 30).map(link))]
        : null,
    );
  }
}
