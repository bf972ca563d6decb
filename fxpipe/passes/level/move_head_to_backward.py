"""Runs a head that is computed in parts of the tokens in B, each part with its gradients.

before: of each part: logits, loss (F), d_logits, d_x (B), d_table (W);  the sum of the losses (F)
after:  all of these in B

F, B and W of a head one after the other would hold the logits of all tokens from one to the next.
"""

from __future__ import annotations

from torch import fx

from fxpipe.ir.storage import call_nodes
from fxpipe.passes.colored.count_beside_loss import count_beside_loss
from fxpipe.schedule.ops import Color, Phase


def move_head_to_backward(graph: fx.Graph) -> None:
    """Give the ops of ``chunk_head`` to B, with what the forward computes of their results."""
    parts = [node for node in call_nodes(graph) if "chunk" in node.meta]
    if not any(node.meta["origin"].backward for node in parts):
        return
    late = set(parts)
    for node in call_nodes(graph):
        color = node.meta["color"]
        if node in late or (color.phase is Phase.F and not late.isdisjoint(node.all_input_nodes)):
            late.add(node)
            node.meta["color"] = Color(color.stage, Phase.B)
    count_beside_loss(graph)
