"""Moves the two values of a loss given as (sum, count) into one section.

before: sum (F, stage 1), count (F, stage 0)
after:  sum (F, stage 1), clone(count) (F, stage 1)
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.builder import Calls
from fxpipe.ir.storage import graph_outputs, set_outputs
from fxpipe.schedule.ops import Color, Phase

aten = torch.ops.aten


def count_beside_loss(graph: fx.Graph) -> None:
    """Move loss and count to the later of their two sections; a count can be a constant."""
    named = graph_outputs(graph)
    if named.loss is None or named.count is None:
        return
    both = {"loss": named.loss, "count": named.count}
    colors = [n.meta["color"] for n in both.values() if n.op == "call_function"]
    stage = max(color.stage for color in colors)
    # A program adds up loss and count together, behind one section.
    phase = max((color.phase for color in colors), key=list(Phase).index)
    for key, node in both.items():
        if node.op == "call_function" and node.meta["color"] == Color(stage, phase):
            continue
        meta = {"val": node.meta["val"], "origin": named.loss.meta["origin"], "color": Color(stage, phase)}
        with graph.inserting_before(graph.output_node()):
            both[key] = Calls(graph)(aten.clone.default, (node,), **meta)
    set_outputs(graph, **both)
