"""From what was asked for to a simulated schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.cli.sources import Source
from fxpipe.errors import ScheduleError
from fxpipe.schedule.families.registry import FAMILIES, build
from fxpipe.schedule.placement import PLACEMENTS
from fxpipe.schedule.search.auto import Objective, Setting, frontier
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline

AUTO = "auto"
CHUNKS = (1, 2, 4)
"""Stages a rank that ``auto`` tries where none are given."""


@dataclass(frozen=True)
class Wish:
    """What is asked of a schedule; None leaves the choice to the family or the search."""

    stages_per_rank: int | None = None
    placement: str | None = None
    memory_limit: float | None = None
    objective: Objective = "makespan"
    effort: float | None = None


def plan(name: str, source: Source, wish: Wish) -> Timeline:
    """The simulated schedule of a family, or of the search for the fastest.

    Raises ScheduleError as :func:`fxpipe.schedule.families.registry.build` and ``search`` do.
    """
    if name == AUTO:
        (found,) = plan_within([wish.memory_limit], source, wish)
        if isinstance(found, ScheduleError):
            raise found
        return found
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
        effort=wish.effort,
        vocabulary=source.vocabulary,
    )
    return simulate(schedule, costs)


def plan_within(limits: Sequence[float | None], source: Source, wish: Wish) -> list[Timeline | ScheduleError]:
    """What the search finds under each memory limit, or why there is nothing.

    More memory never costs time.
    """
    given = wish.stages_per_rank or source.stages_per_rank
    settings = [
        Setting(chunks, placement, source.costs(chunks), vocabulary=source.vocabulary)
        for chunks in ((given,) if given else CHUNKS)
        for placement in ((wish.placement,) if wish.placement else PLACEMENTS)
        if chunks > 1 or placement == wish.placement or placement == "plain"
    ]
    choices = frontier(
        settings,
        ranks=source.ranks,
        microbatches=source.microbatches,
        memory_limits=limits,
        objective=wish.objective,
        effort=wish.effort,
    )
    return [choice if isinstance(choice, ScheduleError) else choice.timeline for choice in choices]
