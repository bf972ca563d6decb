"""What the rules that were applied to a captured step save, by analytic costs."""

from __future__ import annotations

from torch import fx

from fxpipe.cost.device import Device
from fxpipe.cost.nodes import node_cost
from fxpipe.ir.ops import is_causal
from fxpipe.ir.storage import call_nodes
from fxpipe.plan.rewrites import Rewrite


def mask_rewrites(
    graph: fx.Graph, causal: int, without_mask: int, freed: int, device: Device
) -> tuple[Rewrite, ...]:
    """Those of masks of attention.

    causal, without_mask: the calls whose masks were causal, and masked nothing.  freed: bytes of those masks.
    A kernel that knows causality does half of the work: the other half is saved.
    """
    known = [node for node in call_nodes(graph) if is_causal(node)]
    forward = sum(not node.meta["origin"].backward for node in known)
    seconds = sum(node_cost(node, device).seconds for node in known)
    if forward:  # others are causal in the model's own code
        seconds *= causal / max(causal, forward)
    share = causal / max(causal + without_mask, 1)
    made = []
    if causal:
        made.append(Rewrite("causal-masks", causal, seconds, round(freed * share)))
    if without_mask:
        made.append(Rewrite("empty-masks", without_mask, 0.0, freed - round(freed * share)))
    return tuple(made)
