"""Forward values that B makes again instead of keeping them since F.

needs:  W split off, cheap values localised
before: norm (F) ──► mm (F), norm_backward (B), addmm_ (W)
after:  norm (F) ──► mm (F);  norm' (B) ──► norm_backward (B), addmm_ (W)

What is kept is a minimum cut between what a stage is given and what its backward needs: a value costs its
bytes, making it again next to nothing, since it was asked for.  "norms" makes again all but matrix products,
convolutions and attention (norms, activations, dropout with its key, casts: 2503.01328), "full" anything that
lets fewer bytes be kept.  What B makes again is handed to W like other values.
"""

from __future__ import annotations

from typing import Literal

import networkx as nx
from torch import fx

from fxpipe.graph import Colour, Phase, read_buffer
from fxpipe.partition.cost import node_flops
from fxpipe.passes.rewrite import clone_into
from fxpipe.values import call_nodes, drop_dead, is_view, node_bytes

Level = Literal["norms", "full"]
LEVELS: tuple[Level, ...] = ("norms", "full")

_SOURCE, _SINK = "source", "sink"
#: Bytes that must be saved for each byte that an op made again reads or writes.
_PRICE = 1e-3


def recompute(graph: fx.Graph, level: Level) -> None:
    for stage in sorted({node.meta["colour"].stage for node in call_nodes(graph)}):
        again = _made_again(graph, stage, level)
        clones: dict[tuple[Colour, fx.Node], fx.Node] = {}
        backward = [n for n in call_nodes(graph) if _is_backward(n, stage)]
        in_b = _made_in_b(backward, again)
        for user in backward:
            for node in user.all_input_nodes:
                if node in again:
                    clone = clone_into(node, user.meta["colour"], user, clones, again, in_b)
                    user.replace_input_with(node, clone)
    drop_dead(graph)


def _is_backward(node: fx.Node, stage: int) -> bool:
    colour = node.meta["colour"]
    return colour.stage == stage and colour.phase is not Phase.F


def _made_in_b(backward: list[fx.Node], again: set[fx.Node]) -> set[fx.Node]:
    """What B needs itself; W is handed that, and makes the rest."""
    found: set[fx.Node] = set()
    todo = [n for user in backward if user.meta["colour"].phase is Phase.B for n in user.all_input_nodes]
    while todo:
        node = todo.pop()
        if node in again and node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _may(node: fx.Node, stage: int, level: Level) -> bool:
    if node.meta["colour"] != Colour(stage, Phase.F) or node.target is read_buffer:
        return False
    return level == "full" or not node_flops(node)


def _made_again(graph: fx.Graph, stage: int, level: Level) -> set[fx.Node]:
    network = nx.DiGraph()
    todo: list[fx.Node] = []
    for user in call_nodes(graph):
        if not _is_backward(user, stage):
            continue
        for node in user.all_input_nodes:
            if node.op == "call_function" and not _is_backward(node, stage):
                network.add_edge(_SOURCE, (node, "out"))
                todo.append(node)
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        may = _may(node, stage, level)
        is_tuple = isinstance(node.meta["val"], (tuple, list))
        if may and (is_tuple or is_view(node)):  # a tuple cannot be kept, a view keeps what it is a view of
            network.add_edge((node, "out"), (node, "in"))
        else:
            network.add_edge((node, "out"), (node, "in"), capacity=node_bytes(node))
        if not may:
            network.add_edge((node, "in"), _SINK)
            continue
        if not is_view(node):
            moved = node_bytes(node) + sum(node_bytes(n) for n in node.all_input_nodes)
            network.add_edge((node, "in"), _SINK, capacity=_PRICE * moved)
        for n in node.all_input_nodes:
            if n.op == "call_function":
                network.add_edge((node, "in"), (n, "out"))
                todo.append(n)
    if _SOURCE not in network or _SINK not in network:
        return set()
    _, (near, _) = nx.minimum_cut(network, _SOURCE, _SINK)
    return {n for n, side in (x for x in near if isinstance(x, tuple)) if side == "in"}
