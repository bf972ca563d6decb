"""Exchanges between lanes that were divided into a begin and an end, in a forward that is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from fxpipe.ir.graph import Color, origin_of
from fxpipe.ir.ops import ENDS_EXCHANGE
from fxpipe.ir.storage import node_bytes


def exchange_spans(
    graph: fx.Graph, position: Mapping[fx.Node, int], home: Mapping[fx.Node, int]
) -> dict[tuple[int, int], int]:
    """The first and the last position behind which a cut divides an exchange, with the bytes of those that it
    divides.  position: of the forward's ops; home: of all ops.

    An exchange of the backward alone, of a gradient, is divided by a cut behind the forward op that it
    differentiates.
    """
    forward = list(position)
    spans: dict[tuple[int, int], int] = {}
    for end in graph.find_nodes(op="call_function", target=ENDS_EXCHANGE):
        begin = end.args[0]
        if end in position:
            span = position[begin], position[end] - 1
        elif end in home:
            at = home[end]
            uses = [position[user] for user in forward[at].users if user in position]
            span = at, max(at, min(uses, default=at + 1) - 1)
            ends = (user for user in forward[at].users if user.target is ENDS_EXCHANGE)
            if (its_end := next(ends, None)) is not None:
                span = at, position[its_end] - 1
        else:
            continue
        spans[span] = spans.get(span, 0) + node_bytes(begin)
    return spans


def begin_where_operands_are(graph: fx.Graph, stage_of_part: Sequence[int]) -> None:
    """Move the begin of an exchange of gradients to the part of its operand, on the rank of its end.

    By autograd's number it is in the part of the forward op that it differentiates, as its end is.  The begin
    of a forward's that split points have left in another stage moves to its end: it has to be on its rank.
    """
    for end in graph.find_nodes(op="call_function", target=ENDS_EXCHANGE):
        begin = end.args[0]
        if not origin_of(end).backward:
            if len({stage_of_part[node.meta["color"].stage] for node in (begin, end)}) > 1:
                begin.meta["color"] = end.meta["color"]
            continue
        moved = _made_for(begin)
        sources = {n for node in moved for n in node.all_input_nodes} - moved
        stages = [n.meta["color"].stage for n in sources if "color" in n.meta]
        if not all(user in moved or user is end for node in moved for user in node.users) or not stages:
            continue
        here, there = end.meta["color"].stage, min(stages)
        if there > here and stage_of_part[there] == stage_of_part[here]:
            for node in moved:
                node.meta["color"] = Color(there, node.meta["color"].phase)


def _made_for(begin: fx.Node) -> set[fx.Node]:
    """The begin, and the ops of the same gradient before it: a copy of its operand."""
    made, todo = {begin}, [begin]
    while todo:
        for node in todo.pop().all_input_nodes:
            alike = node.op == "call_function" and origin_of(node) == origin_of(begin)
            if alike and node not in made:
                made.add(node)
                todo.append(node)
    return made
