// Search: ops by name, ranks, microbatches, modules, tensors.
"use strict";

class Search {
  constructor(model, input, list, events) {
    Object.assign(this, { model, input, list, events, hits: [], chosen: 0 });
    input.addEventListener("input", () => this.find(input.value.trim()));
    input.addEventListener("focus", () => this.find(input.value.trim()));
    input.addEventListener("blur", () =>
      setTimeout(() => {
        list.hidden = true;
      }, 150),
    );
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && this.hits.length) this.go(this.chosen);
      else if (event.key === "Escape") input.blur();
      else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        this.mark(this.chosen + (event.key === "ArrowDown" ? 1 : -1));
        event.preventDefault();
      }
      event.stopPropagation();
    });
  }

  find(text) {
    const low = text.toLowerCase();
    this.hits = text ? [...this.ops(text), ...this.numbers(low), ...this.texts(low)].slice(0, 14) : [];
    this.list.replaceChildren(
      ...this.hits.map((hit, k) =>
        el("li", { onmousedown: () => this.go(k) }, hit.text, el("span", { class: "soft" }, ` ${hit.what}`)),
      ),
    );
    this.list.hidden = !this.hits.length;
    this.mark(0);
  }

  mark(k) {
    this.chosen = clamp(k, 0, this.hits.length - 1);
    [...this.list.children].forEach((item, j) => item.classList.toggle("now", j === this.chosen));
  }

  go(k) {
    this.list.hidden = true;
    this.input.blur();
    this.hits[k].act();
  }

  ops(text) {
    const name = text.toUpperCase(),
      layer = this.model.predicted,
      place = layer.places.get(name);
    const hit = (text, [rank, k]) => ({
      text,
      what: `on rank ${rank}`,
      act: () => this.events.select({ layer, rank, k, gap: false }),
    });
    if (place) return [hit(layer.nameOf(...place), place)];
    const part = name.match(/^(F|B|W|BW)(\d+)$/),
      first = part && layer.places.get(`${part[1]}${part[2]}.0`);
    return first ? [hit(`${name}.0`, first)] : [];
  }

  numbers(text) {
    const [, word, number] = text.match(/^(rank|stage|microbatch|mb|m)\s*(\d+)$/) || [],
      found = [];
    if (word === "rank" && +number < this.model.ranks)
      found.push(
        { text: `rank ${number}`, what: "why it is idle", act: () => this.events.idle(+number) },
        { text: `rank ${number}`, what: "what is live at its peak", act: () => this.events.live(+number, null) },
      );
    if (word === "stage" && +number < this.model.head.stages)
      found.push({ text: `stage ${number}`, what: "in the graph", act: () => this.events.stage(+number) });
    if (word?.startsWith("m") && +number < this.model.head.microbatches) {
      const [first] = this.model.course(this.model.predicted, +number);
      found.push({
        text: `microbatch ${number}`,
        what: "its way through all ranks",
        act: () => this.events.select({ layer: this.model.predicted, rank: first[0], k: first[1], gap: false }),
      });
    }
    return found;
  }

  // Ops and modules of the graph; tensors of messages come first.
  texts(text) {
    if (text.length < 2) return [];
    const found = [],
      { graph } = this.model;
    for (const edge of this.model.edges)
      for (const [name, shape] of edge.values || [])
        if (name.toLowerCase().includes(text) && edge.from !== edge.to) {
          const place = this.model.predicted.places.get(`${edge.source}.0`);
          found.push({
            text: name,
            what: `${shape}, sent by ${edge.source} to ${edge.target}`,
            act: () => this.events.select({ layer: this.model.predicted, rank: place[0], k: place[1], gap: false }),
          });
        }
    if (graph) {
      const paths = new Set();
      graph.name.forEach((name, op) => {
        const path = graph.texts[graph.path[op]];
        if (found.length > 40) return;
        if (path.toLowerCase().includes(text) && !paths.has(path)) {
          paths.add(path);
          found.push({ text: path, what: "module", act: () => this.events.op(op) });
        }
        if (name.toLowerCase().includes(text))
          found.push({
            text: name,
            what: `op of ${"FBW"[graph.phase[op]]}${graph.stage[op]}`,
            act: () => this.events.op(op),
          });
      });
    }
    return found;
  }
}
