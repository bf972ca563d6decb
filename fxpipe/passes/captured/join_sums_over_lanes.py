"""Makes one sum over the lanes of several that are added, as of the inputs of queries, keys and values.

before: all_reduce(x, "sum", 2) + all_reduce(y, "sum", 2)
after:  all_reduce(x + y, "sum", 2)

Only where nothing else reads these sums.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from fxpipe.ir.builder import Calls
from fxpipe.ir.ops import SUM_OF_LANES
from fxpipe.ir.storage import call_nodes

_ADD = torch.ops.aten.add.Tensor


def join_sums_over_lanes(graph: fx.Graph) -> list[fx.Node]:
    """Returns the sums that are left, one for each that is gone."""
    call, left = Calls(graph), list[fx.Node]()
    for node in call_nodes(graph):
        if node.target is not _ADD or node.kwargs:
            continue
        one, other = cast(tuple[fx.Node, fx.Node], node.args)
        if one is other or _lanes(one) is None or _lanes(one) != _lanes(other):
            continue
        layouts = {(each.meta["val"].shape, each.meta["val"].dtype) for each in (one, other, node)}
        if len(layouts) > 1 or len(one.users) > 1 or len(other.users) > 1:
            continue
        operands = cast(tuple[fx.Node, fx.Node], (one.args[0], other.args[0]))
        val = _ADD(*(x.meta["val"] for x in operands))
        with graph.inserting_before(node):
            added = call(_ADD, operands, origin=node.meta["origin"], val=val)
        node.target, node.args = SUM_OF_LANES, (added, *one.args[1:])
        node.meta["val"] = val.new_empty(val.shape)  # contiguous
        graph.erase_node(one)
        graph.erase_node(other)
        left = [node, *(node if each in (one, other) else each for each in left)]
    return left


def _lanes(value: object) -> tuple[object, ...] | None:
    """The arguments of a sum over the lanes, beside its operand; None for other values."""
    if not isinstance(value, fx.Node) or value.target is not SUM_OF_LANES or value.args[1] != "sum":
        return None
    return value.args[1:]
