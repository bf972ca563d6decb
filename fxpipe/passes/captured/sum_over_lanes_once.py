"""Leaves the sum of a gradient over the lanes to the end of the step, where it is one for all microbatches.

before: gradient of w: all_reduce(x, "sum", 2)
after:  gradient of w: x, and the step sums the bucket of w over the lanes (``rt.sum_over_lanes``)

So it is with the parameters that all lanes hold whole and use on values of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from torch import fx

from fxpipe.ir.storage import graph_outputs, set_outputs


def sum_over_lanes_once(graph: fx.Graph, names: Collection[str]) -> None:
    """names: the parameters of which each summand of the gradient is a sum over the lanes."""
    grads = {
        name: tuple(cast(fx.Node, part.args[0]) for part in parts) if name in names else parts
        for name, parts in graph_outputs(graph).grads.items()
    }
    set_outputs(graph, grads=grads)
