"""Divides exchanges between lanes into a begin and an end, so that a stage can be cut between the two.

before: y = all_to_all(x, 2), …, use(y)
after:  b = begin_all_to_all(x, 2), …, y = end(b, 2), use(y)

before: y = reduce_scatter(x, "sum", 2)
after:  b = begin_all_to_all(x, 2), …, y = sum_shares(end(b, 2), "sum", 2)

Of each op the end stands before the first use.  Pairs that stay in one section become one op again
(``join_exchanges``).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from fxpipe.ir.builder import Calls
from fxpipe.ir.ops import BEGIN_EXCHANGES, ENDS_EXCHANGE, lane_group
from fxpipe.ir.storage import call_nodes

_LANES = torch.ops.lanes
_SUM = _LANES.sum_shares.default
_TO_ALL, _GATHER = BEGIN_EXCHANGES
#: What begins each exchange.
_BEGINS: dict[object, object] = {
    _LANES.all_to_all.default: _TO_ALL,
    _LANES.reduce_scatter.default: _TO_ALL,
    _LANES.all_gather.default: _GATHER,
}


def is_exchange(node: fx.Node) -> bool:
    """Whether a node is an exchange that can be divided."""
    return node.target in _BEGINS


def begin_exchanges(graph: fx.Graph) -> None:
    call = Calls(graph)
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in filter(is_exchange, call_nodes(graph)):
        x, *how = cast(tuple[fx.Node, ...], node.args)
        group = lane_group(node).arguments
        how = how[: len(how) - len(group)]
        val = (x if node.target is _LANES.reduce_scatter.default else node).meta["val"]
        meta = {"origin": node.meta["origin"], "val": val.new_empty(val.shape)}
        with graph.inserting_before(node):
            begun = call(_BEGINS[node.target], (x, *group), **meta)
        users = [user for user in node.users if user.op != "output"]
        if users:
            min(users, key=place.__getitem__).prepend(node)
        node.target, node.args = ENDS_EXCHANGE, (begun, *group)
        if how:
            with graph.inserting_before(node):
                shares = call(ENDS_EXCHANGE, (begun, *group), **meta)
            node.target, node.args = _SUM, (shares, *how, group[0])
