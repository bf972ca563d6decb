"""The collapsed graph: one box for each stage, phase and module, and the bytes that pass between boxes.

before: the colored graph, thousands of nodes
after:  boxes (a module path cut off at one depth for the whole graph) and flows that add up what the
        nodes of one box use of another's

The box that hands a value to a box that uses it:
- the same module's box of an earlier phase of that stage, where it used or made the value too: so what
  runs from a module's F to its B and W is what its forward saves, its inputs included;
- else the box that made it;
- for a value of another stage, the box that uses it first: a value enters a stage once, as in the
  programs, and the flows between two stages carry the bytes of their messages.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from torch import fx

from fxpipe.cost.nodes import node_flops
from fxpipe.ir.graph import Color, Kind, Phase, offload
from fxpipe.ir.storage import call_nodes, node_bytes, output_dict, root_within

BOXES_PER_SECTION = 9
"""In the section with the most; the depth that comes nearest is taken."""

BOXES = 240
"""In all, at most."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which box: a section, and the module path that its nodes share ("" for the model itself)."""

    color: Color
    path: str


@dataclass(frozen=True, slots=True)
class Box:
    """``nodes``: how many, ``flops``: floating-point operations of one microbatch."""

    place: Place
    nodes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Flow:
    """What ``target`` uses of ``source``: a number of values, ``bytes`` of storage in all, and how much of
    that may leave the rank in between (``away``)."""

    source: Place
    target: Place
    values: int
    bytes: int
    offloaded: int = 0

    @property
    def crosses(self) -> bool:
        """Whether it is sent from stage to stage."""
        return self.source.color.stage != self.target.color.stage


@dataclass(frozen=True)
class Boxes:
    """``boxes`` by stage, and in a stage in the order of the model.  ``batch``: leaves of the microbatch
    with the first box of each stage that reads them.  ``results``: loss and count with their boxes."""

    boxes: tuple[Box, ...]
    flows: tuple[Flow, ...]
    batch: tuple[tuple[str, Place], ...]
    results: tuple[tuple[str, Place], ...]


def collapse(graph: fx.Graph, per_section: int = BOXES_PER_SECTION, total: int = BOXES) -> Boxes:
    """Boxes at the depth of module paths that brings the largest section nearest to ``per_section`` boxes,
    among the depths that give at most ``total`` boxes or else one box a section.

    Values that share a storage count once between two boxes of a stage.  Parameters, constants, leaves
    of the batch and views of them are no flows.
    """
    depth = _depth(graph, per_section, total)
    place_of = {n: Place(n.meta["color"], _prefix(n.meta["origin"].path, depth)) for n in call_nodes(graph)}
    members: dict[Place, list[fx.Node]] = defaultdict(list)
    for node, place in place_of.items():
        members[place].append(node)
    places = _sorted(members, {n: i for i, n in enumerate(graph.nodes)})
    results = {name: output_dict(graph)[name] for name in ("loss", "count")}
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


def _sorted(members: dict[Place, list[fx.Node]], order: dict[fx.Node, int]) -> list[Place]:
    """By stage, then by where most of a module's forward is; a module without a forward in a stage
    stands where it does elsewhere."""
    middle = {place: order[nodes[len(nodes) // 2]] for place, nodes in members.items()}
    anywhere: dict[str, int] = {}
    for place in sorted(members, key=_phase_number):
        anywhere.setdefault(place.path, middle[place])

    def key(place: Place) -> tuple[int, int, int]:
        forward = Place(Color(place.color.stage, Phase.F), place.path)
        return place.color.stage, middle.get(forward, anywhere[place.path]), _phase_number(place)

    return sorted(members, key=key)


def _phase_number(place: Place) -> int:
    return list(Phase).index(place.color.phase)


def _flows(place_of: dict[fx.Node, Place]) -> tuple[Flow, ...]:
    holders: dict[tuple[int, fx.Node], list[Place]] = defaultdict(list)  # stage, value -> boxes that have it
    carried: dict[tuple[Place, Place], dict[fx.Node, None]] = defaultdict(dict)
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


def _bytes(values: dict[fx.Node, None], source: Place, target: Place) -> int:
    if source.color.stage != target.color.stage:
        return sum(node_bytes(n) for n in values)
    return sum(node_bytes(n) for n in {root_within(n, target.color.stage) for n in values})


def _batch(place_of: dict[fx.Node, Place]) -> list[tuple[str, Place]]:
    first: dict[tuple[str, int], Place] = {}
    for node, place in place_of.items():
        for source in node.all_input_nodes:
            if source.op == "placeholder" and source.meta["input"].kind is Kind.BATCH:
                first.setdefault((source.meta["input"].name, place.color.stage), place)
    return [(name, place) for (name, _), place in first.items()]
