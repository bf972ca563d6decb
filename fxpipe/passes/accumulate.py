"""Fuses weight gradients with their accumulation, without a temporary of their size.

needs:  W split off, gradients untied
before: g = mm(a, b);             grads[w] = (g,)
after:  addmm_(grad_w, a, b)      grad_w: the accumulator of w, an input of W

An embedding's gradient adds only the rows that were looked up.  Other gradients are added as they are.  These
are the only nodes that write to an input.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from fxpipe.ir.graph import Color, Input, Kind, Origin, Phase
from fxpipe.ir.storage import drop_dead
from fxpipe.names import identifier
from fxpipe.passes.rewrite import gradients, set_gradients

aten = torch.ops.aten


def fuse_accumulation(graph: fx.Graph) -> None:
    first = next(n for n in graph.nodes if n.op != "placeholder")
    fused: dict[str, tuple[fx.Node, ...]] = {}
    times = Counter(part for parts in gradients(graph).values() for part in parts)
    for name, parts in gradients(graph).items():
        with graph.inserting_before(first):
            into = graph.placeholder(identifier(f"grad_{name}"))
        into.meta.update(input=Input(Kind.GRADIENT, name), val=parts[0].meta["val"], origin=Origin())
        with graph.inserting_before(graph.output_node()):
            fused[name] = tuple(_accumulated(graph, into, part, times[part] == 1) for part in parts)
    set_gradients(graph, fused)
    drop_dead(graph)


def _accumulated(graph: fx.Graph, into: fx.Node, part: fx.Node, once: bool) -> fx.Node:
    """Add ``part`` to ``into``; a part that is added only ``once`` is fused with the addition."""
    color = Color(part.meta["color"].stage, Phase.W)

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta.update(color=color, origin=part.meta["origin"], val=into.meta["val"])
        return node

    source, transposed = part, False
    while source.target is aten.t.default and len(source.users) == 1:
        source, transposed = source.args[0], not transposed  # type: ignore[assignment]
    alone = once and len(source.users) == 1 and source.meta["color"] == color
    if alone and source.target is aten.mm.default:
        target = into
        if transposed:
            target = call(aten.t.default, into)
            target.meta["val"] = into.meta["val"].t()
        return call(aten.addmm_.default, target, *source.args)
    if alone and part.target is aten.embedding_dense_backward.default and _plain_lookup(part):
        gradient, index = part.args[:2]
        width = part.meta["val"].shape[1]
        rows = call(aten.reshape.default, index, [-1])
        rows.meta["val"] = index.meta["val"].reshape(-1)  # type: ignore[union-attr]
        values = call(aten.reshape.default, gradient, [-1, width])
        values.meta["val"] = gradient.meta["val"].reshape(-1, width)  # type: ignore[union-attr]
        return call(aten.index_add_.default, into, 0, rows, values)
    return call(aten.add_.Tensor, into, part)


def _plain_lookup(node: fx.Node) -> bool:
    """Whether an embedding has neither a padding row nor scaling by frequency."""
    padding, scaled = node.args[3:5]
    return bool(padding == -1 and not scaled)
