"""Makes one op again of an exchange between lanes that no cut divides.

before: b = begin_all_to_all(x, 2), …, y = end(b, 2)        in one stage, or of weights' gradients
after:  y = all_to_all(x, 2)

before: b = begin_all_to_all(x, 2) in stage 0, y = end(b, 2) in stage 1
after:  the same: other ops run between the two stages
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.builder import node_arg
from fxpipe.ir.ops import BEGIN_EXCHANGES, ENDS_EXCHANGE
from fxpipe.schedule.ops import Phase

_TO_ALL, _GATHER = BEGIN_EXCHANGES
_WHOLE: dict[object, object] = {
    _TO_ALL: torch.ops.lanes.all_to_all.default,
    _GATHER: torch.ops.lanes.all_gather.default,
}


def join_exchanges(graph: fx.Graph) -> None:
    for end in graph.find_nodes(op="call_function", target=ENDS_EXCHANGE):
        begin = node_arg(end, 0)
        sections = begin.meta["color"], end.meta["color"]
        # W runs when there is time for it: nothing waits for what it gives to be exchanged.
        if sections[0].stage != sections[1].stage and Phase.W not in {each.phase for each in sections}:
            continue
        end.target, end.args = _WHOLE[begin.target], begin.args
        if not begin.users:
            graph.erase_node(begin)
