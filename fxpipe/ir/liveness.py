"""Which values of a colored graph live when.

Per stage: the ops of each phase, and the storages that are live between phases, cross between stages, or can
be offloaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import fx

from fxpipe.ir.graph import Kind, Section
from fxpipe.ir.sections import SectionEdge
from fxpipe.ir.storage import call_nodes, is_view, node_bytes, root_within, storage_root
from fxpipe.plan.tensors import is_dense
from fxpipe.schedule.costs import StageBytes
from fxpipe.schedule.ops import Color, Phase

SMALLEST = 4096
"""Bytes: a smaller storage is not worth a transfer."""


@dataclass(frozen=True, eq=False)
class Liveness:
    """Per stage: the ops of each phase, and the storages live between phases, each named by its owner (the
    node that made it on this rank).

    ``ops``: the nodes of each section.  ``saved_activations``: live from F to B or W.  ``saved_for_weight``:
    live from B to W.  ``sent``: per message, the storages that it carries.  ``offloadable``: the saved
    activations that can be offloaded until B, and until W.

    A storage that two stages of one rank both save counts for the first of them, which holds it the longest.
    """

    ops: defaultdict[Color, list[fx.Node]]
    saved_activations: tuple[set[fx.Node], ...]
    saved_for_weight: tuple[set[fx.Node], ...]
    sent: tuple[set[fx.Node], ...]
    offloadable: tuple[dict[Phase, list[fx.Node]], ...]
    edges: tuple[SectionEdge, ...]

    def held(self, stage: int) -> StageBytes[Iterable[fx.Node]]:
        """The storages behind the byte counts of a ``StageCost``."""
        offloadable = self.offloadable[stage]
        return StageBytes(
            self.saved_activations[stage],
            self.saved_for_weight[stage],
            offloadable[Phase.B],
            offloadable[Phase.W],
        )


def liveness(
    graph: fx.Graph,
    sections: tuple[Section, ...],
    edges: tuple[SectionEdge, ...],
    placement: tuple[int, ...],
) -> Liveness:
    """The liveness of a colored graph whose stage s runs on rank ``placement[s]``."""
    ops: defaultdict[Color, list[fx.Node]] = defaultdict(list)
    nodes = {n.name: n for n in call_nodes(graph)}
    for node in nodes.values():
        ops[node.meta["color"]].append(node)
    saved_activations: list[set[fx.Node]] = []
    saved_for_weight: list[set[fx.Node]] = []
    sent: list[set[fx.Node]] = []
    # The first stage of a rank that saves a storage, of those that the rank made.
    saves_activation: dict[fx.Node, int] = {}
    saves_for_weight: dict[fx.Node, int] = {}
    # In the model's order, so that ``setdefault`` finds the first stage that saves a storage.
    for stage in sorted({s.stage for s in sections}):
        rank = placement[stage]
        for roots, first, storages in zip(
            _saved(nodes, [s for s in sections if s.stage == stage]),
            (saves_activation, saves_for_weight),
            (saved_activations, saved_for_weight),
            strict=True,
        ):
            # Views of what another stage of the rank has made keep all of it, which is in memory once.
            owners = {root: _owner(root, rank, placement) for root in roots}
            made_here = {owner for owner in owners.values() if placement[owner.meta["color"].stage] == rank}
            received = {root for root, owner in owners.items() if owner not in made_here}
            storages.append(
                received | {owner for owner in made_here if first.setdefault(owner, stage) == stage}
            )
    for edge in edges:
        values = {nodes[name] for name in edge.names}
        rank = placement[edge.source.stage]
        if rank == placement[edge.target.stage]:
            # Of two stages of a rank the first holds longest: from before the other's F until after its B.
            outer = min(edge.source.stage, edge.target.stage)
            values = {_owner(value, rank, placement) for value in values}
            # What the first stage saves anyway is in memory all that time, and counts there; and a gradient
            # that W needs as well where its own stage keeps it, mostly for longer.
            values = {owner for owner in values if saves_activation.get(owner, outer + 1) > outer}
            if edge.source.phase is Phase.B:
                values -= saved_for_weight[edge.source.stage]
        sent.append(values)
    offloadable = offload_candidates(saved_activations, placement)
    return Liveness(ops, tuple(saved_activations), tuple(saved_for_weight), tuple(sent), offloadable, edges)


def _owner(node: fx.Node, rank: int, placement: tuple[int, ...]) -> fx.Node:
    """The op that made, on this rank, the storage which the node's value lives in."""
    while placement[node.meta["color"].stage] == rank and is_view(node):
        viewed = node.all_input_nodes[0]
        if viewed.op != "call_function":  # of the batch or a parameter, which live all the while
            break
        node = viewed
    return node


def _saved(nodes: dict[str, fx.Node], sections: Iterable[Section]) -> tuple[set[fx.Node], set[fx.Node]]:
    """The owners of the storages that one stage holds from F to B or W, and from B to W.

    A value that another stage sends for W alone has arrived when B begins
    (:func:`fxpipe.ir.graph.arrival`).
    """
    activations: set[fx.Node] = set()
    for_weight: set[fx.Node] = set()
    for section in sections:
        for value in section.inputs:
            if value.kind is Kind.VALUE and value.producer:
                root = root_within(nodes[value.name], section.stage)
                if root.op != "placeholder":
                    # Only what F made or received is there from F on.
                    if value.producer == Color(section.stage, Phase.F):
                        activations.add(root)
                    if section.phase is Phase.W:
                        for_weight.add(root)
    return activations, for_weight


def offload_candidates(
    saved: Sequence[Set[fx.Node]], placement: tuple[int, ...]
) -> tuple[dict[Phase, list[fx.Node]], ...]:
    """Which saved activations of each stage can be offloaded between F and B or W, in the graph's order:
    under B those that B reads, under W those that W alone reads.

    A storage is no candidate if another stage of the same rank reads it as well, if it is small, or if its
    elements do not fill it.
    """
    candidates = []
    for stage, roots in enumerate(saved):
        by_phase: dict[Phase, list[fx.Node]] = {Phase.B: [], Phase.W: []}
        for root in sorted(roots):  # in the graph's order
            used = {color.phase for color in _readers(root, stage) if color.stage == stage}
            # Another stage's op would read it while it is away.
            shared = any(
                color.stage != stage and placement[color.stage] == placement[stage]
                for color in _readers(storage_root(root))
            )
            # What another stage sends for B alone is not there from F on.
            made_here = root.meta["color"].stage == stage or Phase.F in used
            val = root.meta["val"]
            fills = isinstance(val, torch.Tensor) and is_dense(val)
            if made_here and not shared and fills and node_bytes(root) >= SMALLEST:
                by_phase[Phase.B if Phase.B in used else Phase.W].append(root)
        candidates.append(by_phase)
    return tuple(candidates)


def _readers(root: fx.Node, stage: int | None = None) -> set[Color]:
    """The sections that read a value or a view of it; with ``stage``, of the views that this stage makes."""
    readers: set[Color] = set()
    aliases = [root]
    for alias in aliases:
        for user in alias.users:
            if user.op != "call_function":
                continue
            color = user.meta["color"]
            if alias.op == "call_function":
                readers.add(color)
            if is_view(user) and user.args[0] is alias and stage in (None, color.stage):
                aliases.append(user)
    return readers
