// The modules of the graph: a section unfolds to modules, repeated layers to layers, modules to ops.
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
