"""Joins W with B where the schedule runs both as one op: then nothing is kept from one to the other.

before: g = mm(d, w) (B),  h = gelu(x) (B),  t = t(d) (W),  h2 = gelu(x) (W),  addmm_(grad_w, t, h2) (W)
after:  g = mm(d, w) (B),  h = gelu(x) (B),  t = t(d) (B),                     addmm_(grad_w, t, h)  (B)

The ops stand in the order of the backward, so each weight gradient is added as soon as its operands exist.
W repeated cheap values instead of keeping them: those that B has are taken from there.
"""

from __future__ import annotations

from collections.abc import Set

from torch import fx

from fxpipe.ir.storage import call_nodes
from fxpipe.passes.colored.merge_equal import merge_equal
from fxpipe.schedule.ops import Color, Phase


def join_backward(graph: fx.Graph, stages: Set[int]) -> None:
    """Give W's ops to B.  stages: those whose schedule has no op for W alone."""
    backward = {stage: Color(stage, Phase.B) for stage in stages}  # one object a section
    for node in call_nodes(graph):
        if node.meta["color"].stage in stages and node.meta["color"].phase is not Phase.F:
            node.meta["color"] = backward[node.meta["color"].stage]
    # What W had recomputed for itself is in B already.
    merge_equal(graph, {*backward.values()})
