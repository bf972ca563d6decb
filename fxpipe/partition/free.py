"""Values that are cheaper to compute again than to send or to keep: masks, rotary tables, weight views."""

from __future__ import annotations

from torch import fx

from fxpipe.graph import Kind
from fxpipe.partition.cost import node_cost, node_flops
from fxpipe.partition.device import Device
from fxpipe.runtime.random import keyed
from fxpipe.values import call_nodes, node_bytes, output_dict

#: A value is free if all that leads to it takes at most this share of the whole step, or no longer than to
#: send it would.
SHARE = 0.002


def free_nodes(graph: fx.Graph, device: Device, *, across_stages: bool) -> set[fx.Node]:
    """The forward ops whose value any section may compute for itself.

    All that leads to such a value is: what every rank has (the batch, constants, buffers that do not
    change), and little work.  Within one stage, what is made from parameters alone without a matrix
    product (a view, a cast) is free as well; what parameters make of the batch never is.
    """
    changed = set(output_dict(graph)["buffers"])
    at_hand = {Kind.BATCH, Kind.CONSTANT, Kind.BUFFER} | (set() if across_stages else {Kind.PARAMETER})
    cost = {n: node_cost(n, device).seconds for n in call_nodes(graph)}
    budget = SHARE * sum(cost.values())
    leads: dict[fx.Node, frozenset[fx.Node]] = {}  # free node -> the ops that lead to it, itself included
    kinds: dict[fx.Node, frozenset[Kind]] = {}  # free node -> what they read
    for node in graph.nodes:
        if node.op == "placeholder":
            given = node.meta["input"]
            if given.kind in at_hand and not (given.kind is Kind.BUFFER and given.name in changed):
                leads[node], kinds[node] = frozenset(), frozenset([given.kind])
        elif _may_repeat(node) and all(n in leads for n in node.all_input_nodes):
            read = frozenset().union(*(kinds[n] for n in node.all_input_nodes))
            if Kind.PARAMETER in read and (Kind.BATCH in read or node_flops(node)):
                continue
            way = frozenset([node]).union(*(leads[n] for n in node.all_input_nodes))
            sending = device.transfer_seconds(node_bytes(node)) if across_stages else 0.0
            if sum(cost[n] for n in way) <= max(budget, sending):
                leads[node], kinds[node] = way, read
    return {n for n in leads if n.op == "call_function"}


def _may_repeat(node: fx.Node) -> bool:
    return node.op == "call_function" and not node.meta["origin"].backward and node.target is not keyed
