"""What the function of each section takes and gives.

Values that pass between two phases of one stage travel in one list (``saved`` from F to B,
``saved_for_weight`` from F to W, ``gradients`` from B to W), which the receiver empties, so that each value
is freed after its last use and not when the call returns.  Values that can be offloaded travel in lists of
their own (``offloaded``, ``offloaded_for_weight``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fxpipe.codegen.expressions import CONTAINERS
from fxpipe.ir.graph import Kind, Section, Value
from fxpipe.ir.size import size_names
from fxpipe.schedule.ops import Color, Phase

PHASE_NAMES = {Phase.F: "forward", Phase.B: "backward", Phase.W: "weight"}
LISTS = {
    (Phase.F, Phase.B, Kind.VALUE): "saved",
    (Phase.F, Phase.W, Kind.VALUE): "saved_for_weight",
    (Phase.F, Phase.B, Kind.OFFLOADED): "offloaded",
    (Phase.F, Phase.W, Kind.OFFLOADED): "offloaded_for_weight",
    (Phase.B, Phase.W, Kind.VALUE): "gradients",
}


@dataclass(frozen=True)
class Result:
    """The loss, the count, a buffer or an output that a section gives."""

    kind: Kind
    name: str


@dataclass(frozen=True)
class Signature:
    """The signature of a section's function, as data: a saved pipeline keeps it.

    ``lists_in``, ``lists_out``: the lists from and to other phases of its own stage, with the values in each.
    ``values_in``, ``values_out``: the values from and to other stages, with those that the user asks for.
    """

    color: Color
    name: str
    containers: tuple[str, ...]
    """The dicts that it reads (``params``, …), keys, and lengths of the microbatch."""
    lists_in: dict[str, tuple[str, ...]]
    values_in: tuple[str, ...]
    values_out: tuple[str, ...]
    results: tuple[Result, ...]
    """Loss, count and buffers."""
    lists_out: dict[str, tuple[str, ...]]
    parameters: tuple[str, ...]
    """The names of the parameters that it reads."""
    behind_once: tuple[str, ...]
    """The names of those from which is computed, once a step, what it reads."""
    gradients: tuple[str, ...]
    """The names of those to whose gradients it adds."""


def signatures(sections: tuple[Section, ...]) -> dict[Color, Signature]:
    consumers: dict[Color, list[tuple[Color, Value]]] = {s.color: [] for s in sections}
    for section in sections:
        for value in (source for one in section.inputs for source in one.sources):
            if value.producer is not None:
                consumers[value.producer].append((section.color, value))
    return {s.color: _signature(s, consumers[s.color]) for s in sections}


def _signature(section: Section, consumers: list[tuple[Color, Value]]) -> Signature:
    kinds = {v.kind for v in section.inputs}
    containers = [text for kind, text in CONTAINERS.items() if kind in kinds]
    containers += [v.name for v in section.inputs if v.kind is Kind.KEY]
    containers += size_names(section.graph.nodes)
    lists_in: dict[str, list[str]] = {}
    for v in section.inputs:
        if v.producer is not None and v.producer.stage == section.stage:
            lists_in.setdefault(LISTS[v.producer.phase, section.phase, v.kind], []).append(v.name)
    lists_out: dict[str, list[str]] = {}
    for color, v in consumers:
        if color.stage == section.stage:
            lists_out.setdefault(LISTS[section.phase, color.phase, v.kind], []).append(v.name)
    abroad = {v.name for color, v in consumers if color.stage != section.stage}
    leaving = [v.name for v in section.outputs if v.kind is Kind.VALUE and v.name in abroad]
    leaving += [v.name for v in section.outputs if v.kind is Kind.OUTPUT and v.name not in abroad]
    results = (v for v in section.outputs if v.kind in (Kind.LOSS, Kind.COUNT, Kind.BUFFER))
    behind = (x for v in section.inputs for x in v.computed_from)

    def named(values: Iterable[Value], kind: Kind) -> tuple[str, ...]:
        return tuple(dict.fromkeys(v.name for v in values if v.kind is kind))

    return Signature(
        color=section.color,
        name=f"stage{section.stage}_{PHASE_NAMES[section.phase]}",
        containers=tuple(containers),
        lists_in={k: tuple(v) for k, v in lists_in.items()},
        values_in=tuple(
            v.name for v in section.inputs if v.producer is not None and v.producer.stage != section.stage
        ),
        values_out=tuple(leaving),
        results=tuple(Result(v.kind, v.name) for v in results),
        lists_out={k: tuple(v) for k, v in lists_out.items()},
        parameters=named(section.inputs, Kind.PARAMETER),
        behind_once=named(behind, Kind.PARAMETER),
        gradients=named(section.inputs, Kind.GRADIENT),
    )
