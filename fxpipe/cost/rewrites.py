"""What the rules that were applied to a step save, by analytic costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from torch import fx

from fxpipe.cost.devices.device import Device
from fxpipe.cost.fusion import kernels_of
from fxpipe.cost.nodes import NodeSeconds, is_free, node_seconds
from fxpipe.ir.ops import is_causal
from fxpipe.ir.storage import call_nodes, is_view
from fxpipe.plan.rewrites import Rewrite
from fxpipe.schedule.ops import Phase


def mask_rewrites(
    graph: fx.Graph, causal: tuple[int, int], without_mask: tuple[int, int], device: Device
) -> tuple[Rewrite, ...]:
    """The rewrites of attention by what its masks are.

    causal, without_mask: the number of calls whose masks were causal, and masked nothing, and the bytes of
    these masks.  A kernel that knows causality does half of the work: the other half is saved.
    """
    nodes = [node for node in call_nodes(graph) if is_causal(node)]
    forward = sum(not node.meta["origin"].backward for node in nodes)
    seconds = sum(node_seconds(node, device) for node in nodes)
    calls, freed = causal
    seconds *= calls / max(calls, forward, 1)  # others are causal in the model's own code
    by_rule = (
        Rewrite("causal-masks", calls, seconds, freed),
        Rewrite("empty-masks", without_mask[0], bytes=without_mask[1]),
    )
    return tuple(rewrite for rewrite in by_rule if rewrite.ops)


def weight_rewrites(
    graph: fx.Graph, seconds: NodeSeconds, compiled: Collection[Phase]
) -> tuple[Rewrite, ...]:
    """The rewrite of W's ops that are compiled, by what their kernels save over the ops one by one.

    compiled: the phases of which sections are compiled.
    """
    ops, saved = 0, 0.0
    stages = defaultdict[int, list[fx.Node]](list)
    for node in call_nodes(graph):
        if node.meta["color"].phase is Phase.W:
            stages[node.meta["color"].stage].append(node)
    for nodes in stages.values():
        one_by_one, fused = kernels_of(nodes, Phase.W, compiled)
        inside = {*nodes} - {*one_by_one}
        ops += sum(not (is_free(node) or is_view(node)) for node in inside)
        saved += sum(map(seconds, inside))
        saved -= sum(seconds.device.seconds(0, kernel.bytes_moved(), "float32", "move") for kernel in fused)
    return (Rewrite("compiled-weights", ops, max(0.0, saved)),) if ops else ()
