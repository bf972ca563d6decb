"""What the rules that were applied to a captured step save, by analytic costs."""

from __future__ import annotations

from torch import fx

from fxpipe.cost.device import Device
from fxpipe.cost.nodes import node_cost
from fxpipe.ir.ops import is_causal
from fxpipe.ir.storage import call_nodes
from fxpipe.plan.rewrites import Rewrite


def mask_rewrites(
    graph: fx.Graph, causal: tuple[int, int], without_mask: tuple[int, int], device: Device
) -> tuple[Rewrite, ...]:
    """The rewrites of attention by what its masks are.

    causal, without_mask: the number of calls whose masks were causal, and masked nothing, and the bytes of
    these masks.  A kernel that knows causality does half of the work: the other half is saved.
    """
    nodes = [node for node in call_nodes(graph) if is_causal(node)]
    forward = sum(not node.meta["origin"].backward for node in nodes)
    seconds = sum(node_cost(node, device).seconds for node in nodes)
    calls, freed = causal
    seconds *= calls / max(calls, forward, 1)  # others are causal in the model's own code
    by_rule = (
        Rewrite("causal-masks", calls, seconds, freed),
        Rewrite("empty-masks", without_mask[0], bytes=without_mask[1]),
    )
    return tuple(rewrite for rewrite in by_rule if rewrite.ops)
