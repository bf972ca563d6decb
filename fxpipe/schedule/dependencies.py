"""The dependencies of ops, from ``Costs.edges``; used by everything in this folder.

Sections are numbered densely, 3·stage + 0, 1, 2 for F, B, W.  The *value* of a section, its result for one
microbatch, has the number section · microbatches + microbatch.
"""

from __future__ import annotations

from fxpipe.errors import ScheduleError, number_of
from fxpipe.schedule.costs import TIMES, Costs
from fxpipe.schedule.ops import PHASES, Color, Op, OpKind, Phase, arrival

Needs = tuple[tuple[int, float], ...]
"""(section that must have ended, seconds that its value then takes to arrive), …"""

SECTION_KINDS = (OpKind.F, OpKind.B, OpKind.W)
SECTIONS_PER_STAGE = len(SECTION_KINDS)
_OFFSET = {Phase.F: 0, Phase.B: 1, Phase.W: 2}
OFFSETS = {kind: tuple(_OFFSET[phase] for phase in phases) for kind, phases in PHASES.items()}
"""The sections that an op of a kind runs, by their places among those of its stage."""


def index(color: Color) -> int:
    return SECTIONS_PER_STAGE * color.stage + _OFFSET[color.phase]


def sections(stages: int) -> dict[OpKind, tuple[tuple[int, ...], ...]]:
    """The sections that an op runs, by kind and stage: two for BW."""
    return {
        kind: tuple(tuple(SECTIONS_PER_STAGE * stage + k for k in offsets) for stage in range(stages))
        for kind, offsets in OFFSETS.items()
    }


def sections_of(stage: int) -> range:
    """A stage's F, B and W."""
    return range(SECTIONS_PER_STAGE * stage, SECTIONS_PER_STAGE * (stage + 1))


def sections_by_rank(placement: tuple[int, ...]) -> list[list[int]]:
    """The sections of each rank's stages."""
    by_rank: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        by_rank[rank] += sections_of(stage)
    return by_rank


def op_of_value(value: int, microbatches: int) -> Op:
    """The F, B or W that computes a value."""
    section, microbatch = divmod(value, microbatches)
    stage, offset = divmod(section, SECTIONS_PER_STAGE)
    return Op(SECTION_KINDS[offset], stage, microbatch)


def between_lanes(costs: Costs) -> dict[int, float]:
    """Map each section that gives something to an exchange between lanes to the seconds of that."""
    seconds: dict[int, float] = {}
    for edge in costs.edges:
        if edge.exchange:
            source = index(edge.source)
            seconds[source] = max(edge.exchange, seconds.get(source, 0.0))
    return seconds


def durations(costs: Costs) -> dict[OpKind, tuple[float, ...]]:
    """The seconds of an op, by kind and stage."""
    return {
        kind: tuple(sum(getattr(cost, TIMES[phase]) for phase in phases) for cost in costs.stages)
        for kind, phases in PHASES.items()
    }


def needs(costs: Costs, placement: tuple[int, ...]) -> dict[OpKind, tuple[Needs, ...]]:
    """The dependencies of an op, by kind and stage: the edges, and F before B before W of its own stage.

    An edge takes time between two ranks (``Costs.message_seconds``); an edge into W arrives with B.  Raises
    ScheduleError if costs and placement have different numbers of stages, or an edge names an unknown stage.
    """
    stages = len(placement)
    if len(costs.stages) != stages:
        raise ScheduleError(
            f"costs of {number_of(len(costs.stages), 'stage')} given for {number_of(stages, 'placed stage')}"
        )
    # Of several edges between two sections the slowest counts.
    incoming: list[dict[int, float]] = [{} for _ in range(SECTIONS_PER_STAGE * stages)]
    for section in range(len(incoming)):
        if section % SECTIONS_PER_STAGE:
            incoming[section][section - 1] = 0.0
    for edge in costs.edges:
        for end in (edge.source, edge.target):
            if not 0 <= end.stage < stages:
                raise ScheduleError(f"an edge names stage {end.stage}, but there are {stages} stages")
        source, delay = index(edge.source), costs.message_seconds(edge, placement)
        into = incoming[index(arrival(edge.target))]
        into[source] = max(delay, into.get(source, 0.0))
    return {
        kind: tuple(_needs_of(incoming, joined) for joined in per_stage)
        for kind, per_stage in sections(stages).items()
    }


def _needs_of(incoming: list[dict[int, float]], run: tuple[int, ...]) -> Needs:
    return tuple(
        (source, delay) for section in run for source, delay in incoming[section].items() if source not in run
    )
