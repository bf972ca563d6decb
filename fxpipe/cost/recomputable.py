"""Values that are cheaper to recompute than to send or to save: masks, rotary tables, weight views."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from torch import fx

from fxpipe.cost.nodes import NodeSeconds
from fxpipe.ir.graph import Free, Kind
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.ops import has_flops, is_between_lanes
from fxpipe.ir.step_invariants import inputs_behind
from fxpipe.ir.storage import call_nodes, graph_outputs, node_bytes
from fxpipe.runtime.program.checks import expect
from fxpipe.runtime.program.random import keyed

#: A value is free if all ops that lead to it take at most this share of the whole step, or no longer than
#: sending it.
MAX_SHARE = 0.002


def recomputable_nodes(graph: fx.Graph, seconds: NodeSeconds) -> Free:
    """A value is free if its inputs are on every rank (the batch, constants, buffers that do not change) and
    it takes little work.  Within one stage, a value computed from parameters alone without a matrix product
    (a view, a cast) is free as well; a value computed from parameters and the batch never is.
    """
    cost = {n: seconds(n) for n in call_nodes(graph)}
    # A share of the step: what is repeated in each stage must not count.
    budget = MAX_SHARE * sum(cost.values())
    transfer = seconds.device.intra.seconds
    at_hand = frozenset({Kind.BATCH, Kind.CONSTANT, Kind.BUFFER})
    return Free(
        _repeatable(graph, cost, at_hand, lambda node: max(budget, transfer(node_bytes(node)))),
        _repeatable(graph, cost, at_hand | {Kind.PARAMETER}, lambda _: budget),
    )


def _repeatable(
    graph: fx.Graph,
    cost: Mapping[fx.Node, float],
    at_hand: Set[Kind],
    most: Callable[[fx.Node], float],
) -> set[fx.Node]:
    """The ops that take at most ``most`` seconds with all that leads to them."""
    changed = set(graph_outputs(graph).buffers)
    leads: dict[fx.Node, frozenset[fx.Node]] = {}  # free node -> the ops that lead to it, itself included
    kinds: dict[fx.Node, frozenset[Kind]] = {}  # free node -> the kinds of inputs that these read
    for node in graph.nodes:
        if node.op == "placeholder":
            roots = inputs_behind(node.meta["input"])
            if all(x.kind in at_hand and not (x.kind is Kind.BUFFER and x.name in changed) for x in roots):
                leads[node], kinds[node] = frozenset(), frozenset(x.kind for x in roots)
        elif node.op != "call_function" or node.meta["origin"].backward:
            continue
        elif all(map(leads.__contains__, inputs := input_nodes(node))):
            # Nothing uses a check, which has to be where what it reads is.
            if node.target in (keyed, expect) or is_between_lanes(node.target):
                continue
            read = frozenset().union(*(kinds[n] for n in inputs))
            # A stage would need parameters of another one, or repeat a matrix product.
            if Kind.PARAMETER in read and (Kind.BATCH in read or has_flops(node)):
                continue
            way = frozenset([node]).union(*(leads[n] for n in inputs))
            if sum(cost[n] for n in way) <= most(node):
                leads[node], kinds[node] = way, read
    return {n for n in leads if n.op == "call_function"}
