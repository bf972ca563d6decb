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
    graph: fx.Graph, sections: tuple[Section, ...], messages: tuple[Message, ...], device: Device
) -> Costs:
    """Seconds and bytes of every section and message, from shapes and the device's description."""
    seconds: dict[Colour, float] = defaultdict(float)
    nodes = {n.name: n for n in call_nodes(graph)}
    for node in nodes.values():
        seconds[node.meta["colour"]] += node_cost(node, device).seconds
    stages = []
    for stage in sorted({s.stage for s in sections}):
        saved, kept = _held(nodes, [s for s in sections if s.stage == stage])
        forward, backward, weight = (seconds[Colour(stage, phase)] for phase in (Phase.F, Phase.B, Phase.W))
        stages.append(StageCost(forward, backward, weight, saved, kept))
    edges = []
    for message in messages:
        size = sum(node_bytes(nodes[name]) for name in message.names)
        edges.append(Edge(message.source, message.target, size, device.transfer_seconds(size)))
    return Costs(tuple(stages), tuple(edges))


def _held(nodes: dict[str, fx.Node], sections: Iterable[Section]) -> tuple[int, int]:
    """Bytes that one stage holds from F to B, and from B to W, each storage counted once."""
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
    return sum(node_bytes(r) for r in saved), sum(node_bytes(r) for r in kept)
