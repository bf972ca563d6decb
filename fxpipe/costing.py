"""What sections cost: the bridge from the coloured graph to the scheduler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import fx

from fxpipe.graph import Colour, Kind, Phase, Section
from fxpipe.partition.cost import node_cost
from fxpipe.partition.device import Device
from fxpipe.schedule.costs import Costs, Edge, StageCost
from fxpipe.sections import Message
from fxpipe.values import call_nodes, node_bytes, root_within


def analytic_costs(
    graph: fx.Graph,
    sections: tuple[Section, ...],
    messages: tuple[Message, ...],
    placement: tuple[int, ...],
    device: Device,
) -> Costs:
    """Seconds and bytes of every section and message, from shapes and the device's description.

    What two stages of one rank both save counts for the first of them, which holds it the longest.
    """
    seconds: dict[Colour, float] = defaultdict(float)
    nodes = {n.name: n for n in call_nodes(graph)}
    for node in nodes.values():
        seconds[node.meta["colour"]] += node_cost(node, device).seconds
    stages: list[StageCost] = []
    owned: dict[int, set[fx.Node]] = defaultdict(set)  # rank -> storages made there that its stages save
    for stage in sorted({s.stage for s in sections}):
        rank = placement[stage]
        saved, kept = _held(nodes, [s for s in sections if s.stage == stage])
        own = {n for n in saved if placement[n.meta["colour"].stage] == rank}
        forward, backward, weight = (seconds[Colour(stage, phase)] for phase in (Phase.F, Phase.B, Phase.W))
        stages.append(StageCost(forward, backward, weight, _bytes(saved - owned[rank]), _bytes(kept)))
        owned[rank] |= own
    edges = []
    for message in messages:
        values = {nodes[name] for name in message.names}
        rank = placement[message.source.stage]
        if rank == placement[message.target.stage]:
            values -= owned[rank]
        size = _bytes(values)
        edges.append(Edge(message.source, message.target, size, device.transfer_seconds(size)))
    return Costs(tuple(stages), tuple(edges))


def _bytes(roots: set[fx.Node]) -> int:
    return sum(node_bytes(r) for r in roots)


def _held(nodes: dict[str, fx.Node], sections: Iterable[Section]) -> tuple[set[fx.Node], set[fx.Node]]:
    """The owners of the storages that one stage holds from F to B, and from B to W."""
    saved: set[fx.Node] = set()
    kept: set[fx.Node] = set()
    for section in sections:
        for value in section.inputs:
            if value.kind is Kind.VALUE and value.producer and value.producer.stage == section.stage:
                root = root_within(nodes[value.name], section.stage)
                if root.op != "placeholder":
                    if value.producer.phase is Phase.F:
                        saved.add(root)
                    if section.phase is Phase.W:
                        kept.add(root)
    return saved, kept
