"""What W needs from F and B, chosen by bytes.

needs:  W split off
after:  fewest bytes live between B and W; the cheap ops in between are computed again in W

Keeping is a minimum cut between what must be computed once (matrix products, reductions, what another
rank sent) and W: a view, a cast or an elementwise op may be repeated, at the price of its own inputs
and of the time it takes.  Of equally small cuts the one with the least to repeat is taken.
"""

from __future__ import annotations

import networkx as nx
import torch
from torch import fx

from fxpipe.graph import Colour, Phase
from fxpipe.passes.rewrite import clone_into
from fxpipe.values import call_nodes, drop_dead, is_view, node_bytes

aten = torch.ops.aten
_SOURCE, _SINK = "source", "sink"
_CASTS = {aten._to_copy.default}

#: Bytes of memory that must be saved for each byte that a repeated op reads or writes.
REPEAT_PRICE = 0.25


def keep_fewest_bytes(graph: fx.Graph) -> None:
    by_stage: dict[int, list[fx.Node]] = {}
    for node in call_nodes(graph):
        if node.meta["colour"].phase is Phase.W:
            by_stage.setdefault(node.meta["colour"].stage, []).append(node)
    for stage, users in by_stage.items():
        repeated = _to_repeat(users, stage)
        clones: dict[tuple[Colour, fx.Node], fx.Node] = {}
        for user in users:
            for node in user.all_input_nodes:
                if node in repeated:
                    clone = clone_into(node, Colour(stage, Phase.W), user, clones, repeated)
                    user.replace_input_with(node, clone)
    drop_dead(graph)


def _is_cheap(node: fx.Node, stage: int) -> bool:
    if node.meta["colour"].stage != stage:
        return False
    return is_view(node) or node.target in _CASTS or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _to_repeat(users: list[fx.Node], stage: int) -> set[fx.Node]:
    """The nodes outside W on W's side of the cut."""
    # The flow runs from W backwards, so that the cut found is the one nearest to W.
    network = nx.DiGraph()
    todo, seen = [], set(users)
    for user in users:
        for node in user.all_input_nodes:
            if node.op == "call_function" and node.meta["colour"].phase is not Phase.W:
                network.add_edge(_SOURCE, (node, "out"))
                todo.append(node)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        # A view holds its whole storage: only what owns the storage is ever kept.
        if is_view(node) and _is_cheap(node, stage):
            network.add_edge((node, "out"), (node, "in"))
        else:
            network.add_edge((node, "out"), (node, "in"), capacity=node_bytes(node))
        if _is_cheap(node, stage):
            if not is_view(node):
                moved = node_bytes(node) + sum(node_bytes(n) for n in node.all_input_nodes)
                network.add_edge((node, "in"), _SINK, capacity=REPEAT_PRICE * moved)
            for n in node.all_input_nodes:
                if n.op == "call_function":
                    network.add_edge((node, "in"), (n, "out"))
                    todo.append(n)
        else:
            network.add_edge((node, "in"), _SINK)
    if _SOURCE not in network or _SINK not in network:
        return set()
    _, (near, _) = nx.minimum_cut(network, _SOURCE, _SINK)
    return {n for n, side in (x for x in near if isinstance(x, tuple)) if side == "in"}
