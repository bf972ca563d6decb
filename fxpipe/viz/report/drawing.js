// The drawing of the graph: boxes and frames where dagre puts them; zoom and pan.
"use strict";

class Drawing {
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
      const label = g.edge(name),
        { points } = label,
        [from, to] = [g.node(name.v), g.node(name.w)];
      points.forEach((point) => {
        point.y = down(point.y);
      });
      if (label.y) label.y = down(label.y);
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

  draw(g, clusters) {
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
      const { points, edge, kind, x: middle, y: height } = g.edge(name),
        home = g.node(edge.to).item.section.stage,
        size = (op) => this.model.sentBytes.get(`${op} ${home}`) ?? graph.bytes[op],
        bytes = [...edge.sources].reduce((sum, op) => sum + size(op), 0);
      const path = svg("path", { class: `edge ${kind}`, d: curve(points) });
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
      if (middle && bytes)
        group.append(this.text(middle, height, bytesText(bytes), { class: "bytes", "text-anchor": "middle" }));
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
        scale = clamp(Math.min(w / this.size[0], Math.max(h / this.size[1], 0.85)), 0.45, 1.15);
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
}

function curve(points) {
  const [first, ...rest] = points;
  let path = `M${first.x} ${first.y}`;
  for (let k = 0; k < rest.length - 1; k++)
    path += `Q${rest[k].x} ${rest[k].y} ${(rest[k].x + rest[k + 1].x) / 2} ${(rest[k].y + rest[k + 1].y) / 2}`;
  return `${path}L${rest.at(-1).x} ${rest.at(-1).y}`;
}
