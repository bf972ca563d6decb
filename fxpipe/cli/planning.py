"""From what was asked for to a simulated schedule."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.cli.sources import Source
from fxpipe.errors import ScheduleError
from fxpipe.schedule.families.registry import FAMILIES, build
from fxpipe.schedule.placement import PLACEMENTS
from fxpipe.schedule.search.auto import Objective, Setting, search
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline

AUTO = "auto"
CHUNKS = (1, 2, 4)
"""Stages a rank that ``auto`` tries where none are given."""


@dataclass(frozen=True)
class Wish:
    """What is asked of a schedule; None leaves the choice to the family."""

    stages_per_rank: int | None = None
    placement: str | None = None
    memory_limit: float | None = None
    objective: Objective = "makespan"


def plan(name: str, source: Source, wish: Wish) -> Timeline:
    """The simulated schedule of a family, or of the search for the fastest.

    Raises ScheduleError as :func:`fxpipe.schedule.families.registry.build` and ``search`` do.
    """
    if name == AUTO:
        return _search(source, wish)
    if name not in FAMILIES:
        raise ScheduleError(f"unknown schedule {name!r}; known: {', '.join((*FAMILIES, AUTO))}")
    family = FAMILIES[name]
    chunks = wish.stages_per_rank or source.stages_per_rank or family.stages_per_rank
    costs = source.costs(chunks)
    schedule = build(
        name,
        ranks=source.ranks,
        microbatches=source.microbatches,
        costs=costs,
        stages_per_rank=chunks,
        placement=wish.placement,
        memory_limit=wish.memory_limit,
        vocabulary=source.vocabulary,
    )
    return simulate(schedule, costs)


def _search(source: Source, wish: Wish) -> Timeline:
    given = wish.stages_per_rank or source.stages_per_rank
    settings = [
        Setting(chunks, placement, source.costs(chunks), vocabulary=source.vocabulary)
        for chunks in ((given,) if given else CHUNKS)
        for placement in ((wish.placement,) if wish.placement else PLACEMENTS)
        if chunks > 1 or placement == wish.placement or placement == "plain"
    ]
    choice = search(
        settings,
        ranks=source.ranks,
        microbatches=source.microbatches,
        memory_limit=wish.memory_limit,
        objective=wish.objective,
    )
    return choice.timeline
