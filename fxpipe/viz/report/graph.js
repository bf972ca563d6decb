// The colored graph: sections unfold to modules, repeated layers to layers, modules to ops.  dagre lays it out.
"use strict";

const MARKS = [
  ["S", "saved for B or W"],
  ["K", "kept for W"],
  ["R", "recomputed"],
  ["O", "offloaded"],
  ["H", "sharded"],
  ["→", "sent to another stage"],
];
const TITLE = 19,
  FRAME = 7; // pixels of a cluster above and around what is in it
const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter(Boolean));
  return made;
}

// The modules of one section as a tree.  An item: {id, label, items, ops}; an op has the item's place, too.
class Section {
  constructor(graph, stage, phase) {
    Object.assign(this, { graph, stage, phase, ops: [] });
  }

  // Items for the ops whose paths begin with `prefix`, each a module below it or an op of the module itself.
  items(ops, depth, id) {
    const { graph } = this,
      found = [],
      groups = new Map();
    for (const op of ops) {
      const parts = graph.texts[graph.path[op]].split(".").filter(Boolean);
      if (parts.length <= depth) {
        found.push({ id: `op${op}`, op, ops: [op] });
        continue;
      }
      const name = parts.slice(0, depth + 1).join(".");
      if (!groups.has(name)) {
        const item = { id: `${id}/${name}`, label: name, depth: depth + 1, ops: [], section: this };
        groups.set(name, item);
        found.push(item);
      }
      groups.get(name).ops.push(op);
    }
    return this.fold(found.map((item) => this.compress(item)));
  }

  // A module with one child and no ops of its own is shown as that child.
  compress(item) {
    while (item.op === undefined) {
      const heads = new Set(
        item.ops.map((op) =>
          this.graph.texts[this.graph.path[op]]
            .split(".")
            .filter(Boolean)
            .slice(0, item.depth + 1)
            .join("."),
        ),
      );
      const [only] = heads;
      if (heads.size !== 1 || only === item.label) return item;
      item = { ...item, id: `${item.id}/${only}`, label: only, depth: item.depth + 1 };
    }
    return item;
  }

  // Neighbors of a list of modules ("h.2", "h.3") with the same ops become one item.
  fold(items) {
    const found = [];
    for (const item of items) {
      const last = found.at(-1),
        kind = item.op === undefined && this.signature(item);
      if (kind && last?.kind === kind) {
        last.members.push(item);
        last.ops = [...last.ops, ...item.ops];
      } else found.push(kind ? { ...item, id: `${item.id}…`, kind, members: [item] } : item);
    }
    return found.map((item) => (item.members?.length === 1 ? item.members[0] : item));
  }

  signature(item) {
    const { graph } = this;
    if (!/(^|\.)\d+$/.test(item.label)) return null;
    return (
      item.label.replace(/\d+$/, "") +
      item.ops
        .map((op) => `${graph.texts[graph.path[op]].slice(item.label.length)}:${graph.target[op]}:${graph.shape[op]}`)
        .join()
    );
  }

  open(item) {
    return item.members || this.items(item.ops, item.depth, item.id);
  }
}

class GraphView {
  constructor(model, tools, host, events) {
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
        width: Math.max(lines[0].length * 6.6 + 38 + 7 * marks.length, ...lines.map((l) => l.length * 6.2 + 18)),
        height: 8 + 15 * lines.length,
      });
    }
    for (const item of [...clusters, ...leaves]) if (item.parent) g.setParent(item.id, item.parent.id);
    const edges = this.edges(leaves);
    for (const edge of edges) g.setEdge(edge.from, edge.to, { edge });
    dagre.layout(g);
    this.frame(g, clusters, leaves);
    this.draw(g, clusters, edges.length);
  }

  // Room for the titles of clusters: all that is below the top of one moves down, and frames are drawn around.
  frame(g, clusters, leaves) {
    const under = new Map(clusters.map((c) => [c.id, []])),
      inner = [...clusters].reverse();
    for (const item of [...leaves, ...inner]) if (item.parent) under.get(item.parent.id).push(item.id);
    const top = new Map(),
      bottom = new Map(),
      half = (id) => g.node(id).height / 2;
    for (const { id } of leaves) {
      top.set(id, g.node(id).y - half(id));
      bottom.set(id, g.node(id).y + half(id));
    }
    for (const { id } of inner) {
      top.set(id, Math.min(...under.get(id).map((x) => top.get(x))));
      bottom.set(id, Math.max(...under.get(id).map((x) => bottom.get(x))));
    }
    const tops = inner.map(({ id }) => top.get(id)),
      bottoms = inner.map(({ id }) => bottom.get(id));
    const down = (y) =>
      y + TITLE * tops.filter((t) => t <= y + 0.5).length + FRAME * bottoms.filter((b) => b <= y - 0.5).length;
    for (const { id } of leaves) g.node(id).y = down(g.node(id).y - half(id)) + half(id);
    for (const name of g.edges()) {
      const { points } = g.edge(name),
        [from, to] = [g.node(name.v), g.node(name.w)];
      points.forEach((point) => {
        point.y = down(point.y);
      });
      points[0].y = from.y + from.height / 2;
      points.at(-1).y = to.y - to.height / 2;
    }
    const box = new Map(
      leaves.map(({ id }) => {
        const n = g.node(id);
        return [id, [n.x - n.width / 2, n.y - n.height / 2, n.x + n.width / 2, n.y + n.height / 2]];
      }),
    );
    for (const { id } of inner) {
      const own = under.get(id).map((x) => box.get(x)),
        edge = (k, f) => f(...own.map((b) => b[k]));
      const [left, high, right, low] = [
        edge(0, Math.min) - FRAME,
        edge(1, Math.min) - TITLE,
        edge(2, Math.max) + FRAME,
        edge(3, Math.max) + FRAME,
      ];
      box.set(id, [left, high, right, low]);
      Object.assign(g.node(id), {
        x: (left + right) / 2,
        y: (high + low) / 2,
        width: right - left,
        height: low - high,
      });
    }
    const all = [...box.values()];
    this.origin = [Math.min(...all.map((b) => b[0])) - 12, Math.min(...all.map((b) => b[1])) - 12];
    this.size = [
      Math.max(...all.map((b) => b[2])) + 12 - this.origin[0],
      Math.max(...all.map((b) => b[3])) + 12 - this.origin[1],
    ];
  }

  draw(g, clusters, edges) {
    const group = svg("g"),
      { graph } = this;
    for (const item of clusters) {
      const n = g.node(item.id),
        fold = () => {
          this.opened.delete(item.id);
          this.keep(item.id);
        };
      group.append(
        svg("rect", {
          class: `cluster ${item.section.phase}`,
          x: n.x - n.width / 2,
          y: n.y - n.height / 2,
          width: n.width,
          height: n.height,
          rx: 6,
        }),
        this.text(n.x - n.width / 2 + 8, n.y - n.height / 2 + 11, `▾ ${this.lines(item)[0]}`, {
          class: "cluster-title",
          tabindex: 0,
          role: "button",
          onclick: fold,
          onkeydown: (e) => e.key === "Enter" && fold(),
        }),
      );
    }
    for (const name of g.edges()) {
      const { points, edge } = g.edge(name),
        bytes = [...edge.sources].reduce((sum, op) => sum + graph.bytes[op], 0);
      const stage = (id) => g.node(id).item.section.stage,
        phase = (id) => g.node(id).item.section.phase;
      const kind =
        stage(edge.from) !== stage(edge.to) ? "crosses" : phase(edge.from) !== phase(edge.to) ? "keeps" : "";
      const middle = points[Math.floor(points.length / 2)],
        path = svg("path", { class: `edge ${kind}`, d: curve(points) });
      path.append(
        svg(
          "title",
          {},
          `${edge.sources.size} value${edge.sources.size > 1 ? "s" : ""}, ${bytesText(bytes)}: ${[...edge.sources]
            .slice(0, 8)
            .map((op) => graph.name[op])
            .join(", ")}`,
        ),
      );
      const { x, y } = points.at(-1),
        before = points.at(-2),
        angle = (Math.atan2(y - before.y, x - before.x) * 180) / Math.PI;
      group.append(
        path,
        svg("path", {
          class: `tip ${kind}`,
          d: "M0 0L-7 -3.5L-7 3.5Z",
          transform: `translate(${x} ${y}) rotate(${angle})`,
        }),
      );
      if (kind && bytes && edges < 90)
        group.append(this.text(middle.x + 4, middle.y, bytesText(bytes), { class: "bytes" }));
    }
    for (const id of g.nodes()) {
      const n = g.node(id);
      if (!n.item) continue;
      const act = () => (n.item.op !== undefined ? this.op(n.item.op) : (this.opened.add(id), this.keep(id)));
      const box = svg(
        "g",
        {
          class: `node ${n.item.section.phase} ${n.item.op !== undefined ? "op" : "group"} ${this.found === id ? "found" : ""}`,
          "data-id": id,
          tabindex: 0,
          role: "button",
          transform: `translate(${n.x - n.width / 2} ${n.y - n.height / 2})`,
          onclick: act,
          onkeydown: (e) => e.key === "Enter" && act(),
        },
        svg("rect", { width: n.width, height: n.height, rx: n.item.op !== undefined ? 2 : 6 }),
        ...n.lines.map((line, k) =>
          this.text(
            8,
            13 + 15 * k,
            k || n.item.op !== undefined ? line : `▸ ${n.item.root ? "" : `${n.item.section.phase} `}${line}`,
            { class: k ? "soft" : "" },
          ),
        ),
        n.marks ? this.text(n.width - 7, 13, n.marks, { class: "mark", "text-anchor": "end" }) : null,
      );
      group.append(box);
    }
    this.nodes = g;
    this.drawing = svg("svg", { xmlns: SVG }, group);
    this.host.replaceChildren(this.drawing);
    this.fit();
  }

  text(x, y, content, attributes) {
    const made = svg("text", { x, y, ...attributes });
    made.textContent = content;
    return made;
  }

  // Draw anew with one item at its old place.
  keep(id) {
    const place = (x) => {
      const n = this.nodes.hasNode(x) && this.nodes.node(x);
      return n && n.x ? n : null;
    };
    const before = place(id),
      view = this.view;
    this.render();
    const after = place(id);
    if (before && after && view) {
      this.view = { ...view, x: view.x + after.x - before.x, y: view.y + after.y - before.y };
      this.fit();
    }
  }

  center(id) {
    const n = this.nodes.node(id);
    if (!n) return;
    const { clientWidth: w, clientHeight: h } = this.host;
    this.view = { x: n.x - w / 2, y: n.y - h / 2, scale: 1 };
    this.fit();
  }

  fit() {
    const { clientWidth: w, clientHeight: h } = this.host;
    if (!w) return;
    if (!this.view) {
      const [left, top] = this.origin,
        scale = clamp(Math.min(w / this.size[0], h / this.size[1]), 0.72, 1.15);
      this.view = {
        scale,
        x: left + Math.max(0, this.size[0] - w / scale) / 2 + Math.min(0, this.size[0] - w / scale) / 2,
        y: top,
      };
    }
    const { x, y, scale } = this.view;
    this.drawing.setAttribute("viewBox", `${x} ${y} ${w / scale} ${h / scale}`);
  }

  listen() {
    let drag = null;
    this.host.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        const box = this.host.getBoundingClientRect(),
          { x, y, scale } = this.view,
          next = clamp(scale * Math.exp(-clamp(event.deltaY, -200, 200) * 0.002), 0.05, 4);
        const [px, py] = [event.clientX - box.left, event.clientY - box.top];
        this.view = { scale: next, x: x + px / scale - px / next, y: y + py / scale - py / next };
        this.fit();
      },
      { passive: false },
    );
    this.host.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, y: event.clientY, view: this.view };
    });
    addEventListener("pointermove", (event) => {
      if (!drag || Math.hypot(event.clientX - drag.x, event.clientY - drag.y) < 4) return;
      this.view = {
        ...drag.view,
        x: drag.view.x - (event.clientX - drag.x) / drag.view.scale,
        y: drag.view.y - (event.clientY - drag.y) / drag.view.scale,
      };
      this.fit();
    });
    addEventListener("pointerup", () => {
      drag = null;
    });
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

function curve(points) {
  const [first, ...rest] = points;
  let path = `M${first.x} ${first.y}`;
  for (let k = 0; k < rest.length - 1; k++)
    path += `Q${rest[k].x} ${rest[k].y} ${(rest[k].x + rest[k + 1].x) / 2} ${(rest[k].y + rest[k + 1].y) / 2}`;
  return `${path}L${rest.at(-1).x} ${rest.at(-1).y}`;
}
