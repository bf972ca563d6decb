"""The collapsed graph: one box for each stage, phase and module, and the bytes that pass between boxes.

before: the colored graph, thousands of nodes
after:  boxes (module paths, cut off at one depth for the whole graph) and flows, each the sum of the values
        that the nodes of one box use of another box

A flow to a box that uses a value starts at
- the same module's box of an earlier phase of that stage, if that box used or made the value too: so the
  flows from a module's F to its B and W are the values that its forward saves, inputs included;
- else the box that made the value;
- for a value of another stage, the box that uses it first: a value enters a stage once, as in the
  programs, and the flows between two stages carry the bytes of their messages.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from torch import fx

from fxpipe.ir.graph import Kind, offload
from fxpipe.ir.ops import node_flops
from fxpipe.ir.storage import call_nodes, graph_outputs, node_bytes, root_within
from fxpipe.schedule.ops import Color, Phase

BOXES_PER_SECTION = 9
"""Target number of boxes in the largest section; the depth that comes nearest is taken."""

BOXES = 240
"""Maximum number of boxes of all sections."""


@dataclass(frozen=True, slots=True)
class BoxKey:
    """The key of a box: a section, and the module path that its nodes share ("" for the model itself)."""

    color: Color
    path: str


@dataclass(frozen=True, slots=True)
class Box:
    """``nodes``: their number.  ``flops``: floating-point operations of one microbatch."""

    place: BoxKey
    nodes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Flow:
    """The values that ``target`` uses of ``source``: their number, the ``bytes`` of their storages, and the
    bytes that can be offloaded in between (``offloaded``)."""

    source: BoxKey
    target: BoxKey
    values: int
    bytes: int
    offloaded: int = 0

    @property
    def crosses(self) -> bool:
        """Whether the values cross between two stages."""
        return self.source.color.stage != self.target.color.stage

    @property
    def is_to_weights(self) -> bool:
        """Whether a module's F or B hands the values to its W."""
        same = not self.crosses and self.source.path == self.target.path
        return same and self.target.color.phase is Phase.W


@dataclass(frozen=True)
class Boxes:
    """``boxes``: by stage, and within a stage in model order.  ``batch``: leaves of the microbatch with the
    first box of each stage that reads them.  ``results``: loss, count and requested outputs with their
    boxes."""

    boxes: tuple[Box, ...]
    flows: tuple[Flow, ...]
    batch: tuple[tuple[str, BoxKey], ...]
    results: tuple[tuple[str, BoxKey], ...]


def collapse(graph: fx.Graph, per_section: int = BOXES_PER_SECTION, total: int = BOXES) -> Boxes:
    """Collapse the graph to boxes at one depth of module paths.

    The depth is the one at which the largest section has nearest to ``per_section`` boxes, among the depths
    with at most ``total`` boxes, or else one box per section.  Values that share a storage count once between
    two boxes of a stage.  Parameters, constants, leaves of the batch and views of them are not flows.
    """
    depth = _depth(graph, per_section, total)
    place_of = {n: BoxKey(n.meta["color"], _prefix(n.meta["origin"].path, depth)) for n in call_nodes(graph)}
    members: dict[BoxKey, list[fx.Node]] = defaultdict(list)
    for node, place in place_of.items():
        members[place].append(node)
    places = _sorted(members, {n: i for i, n in enumerate(graph.nodes)})
    named = graph_outputs(graph)
    results = {**named.outputs, "loss": named.loss, "count": named.count}
    return Boxes(
        tuple(Box(place, len(members[place]), sum(map(node_flops, members[place]))) for place in places),
        _flows(place_of),
        tuple(_batch(place_of)),
        tuple((name, place_of[node]) for name, node in results.items() if node is not None),
    )


def _depth(graph: fx.Graph, per_section: int, total: int) -> int:
    paths = {(n.meta["color"], n.meta["origin"].path) for n in call_nodes(graph)}
    deepest = max((path.count(".") + 1 for _, path in paths if path), default=0)
    best, miss = 0, math.inf
    for depth in range(1, deepest + 1):
        boxes = {(color, _prefix(path, depth)) for color, path in paths}
        largest = max(Counter(color for color, _ in boxes).values())
        if len(boxes) <= total and abs(math.log(largest / per_section)) < miss:
            best, miss = depth, abs(math.log(largest / per_section))
    return best


def _prefix(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth])


def _sorted(members: dict[BoxKey, list[fx.Node]], order: dict[fx.Node, int]) -> list[BoxKey]:
    """Sort boxes by stage, then by the middle of the module's forward; a module without a forward in a stage
    takes its position in another one."""
    middle = {place: order[nodes[len(nodes) // 2]] for place, nodes in members.items()}
    anywhere: dict[str, int] = {}
    for place in sorted(members, key=_phase_number):
        anywhere.setdefault(place.path, middle[place])

    def key(place: BoxKey) -> tuple[int, int, int]:
        forward = BoxKey(Color(place.color.stage, Phase.F), place.path)
        return place.color.stage, middle.get(forward, anywhere[place.path]), _phase_number(place)

    return sorted(members, key=key)


def _phase_number(place: BoxKey) -> int:
    return list(Phase).index(place.color.phase)


def _flows(place_of: dict[fx.Node, BoxKey]) -> tuple[Flow, ...]:
    holders: dict[tuple[int, fx.Node], list[BoxKey]] = defaultdict(list)  # stage, value -> boxes that have it
    carried: dict[tuple[BoxKey, BoxKey], dict[fx.Node, None]] = defaultdict(dict)
    for user, place in sorted(place_of.items(), key=lambda item: _phase_number(item[1])):
        stage = place.color.stage
        holders[stage, user].append(place)
        for value in user.all_input_nodes:
            if value not in place_of or root_within(value, stage).op == "placeholder":
                continue
            having = holders[stage, value]
            if place not in having:
                same = [h for h in having if h.path == place.path]
                source = same[-1] if same else having[0] if having else place_of[value]
                carried[source, place][value] = None
                having.append(place)
    return tuple(
        Flow(
            source,
            target,
            len(values),
            _bytes(values, source, target),
            sum(node_bytes(n) for n in values if n.target is offload),
        )
        for (source, target), values in carried.items()
    )


def _bytes(values: dict[fx.Node, None], source: BoxKey, target: BoxKey) -> int:
    if source.color.stage != target.color.stage:
        return sum(node_bytes(n) for n in values)
    return sum(node_bytes(n) for n in {root_within(n, target.color.stage) for n in values})


def _batch(place_of: dict[fx.Node, BoxKey]) -> list[tuple[str, BoxKey]]:
    first: dict[tuple[str, int], BoxKey] = {}
    for node, place in place_of.items():
        for source in node.all_input_nodes:
            if source.op == "placeholder" and source.meta["input"].kind is Kind.BATCH:
                first.setdefault((source.meta["input"].name, place.color.stage), place)
    return [(name, place) for (name, _), place in first.items()]
