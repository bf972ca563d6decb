"""From a request to simulated schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxpipe.cli.sources import CostSource
from fxpipe.errors import ScheduleError
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.search.auto import Objective, SearchResult, Setting, frontier
from fxpipe.schedule.search.fastest import AUTO, fastest, stages_and_placements
from fxpipe.schedule.simulation.timeline import Timeline


@dataclass(frozen=True)
class ScheduleRequest:
    """The demands on a schedule; None leaves the choice to the family or the search."""

    stages_per_rank: int | None = None
    placement: str | None = None
    memory_limit: float | None = None
    objective: Objective = "makespan"
    effort: float | None = None


def plan(name: str, source: CostSource, request: ScheduleRequest) -> Timeline:
    """The simulated schedule of a family, or of the search for the fastest.

    Raises ScheduleError as :func:`fxpipe.schedule.search.build.build` and ``search`` do.
    """
    if name not in (*FAMILIES, AUTO):
        raise ScheduleError(f"unknown schedule {name!r}; known: {', '.join((*FAMILIES, AUTO))}")
    return fastest(
        name,
        _settings(name, source, request),
        ranks=source.ranks,
        microbatches=source.microbatches,
        objective=request.objective,
        effort=request.effort,
    ).timeline


def plan_within(
    limits: Sequence[float | None], source: CostSource, request: ScheduleRequest
) -> list[Timeline | ScheduleError]:
    """The result of the search under each memory limit, or the reason that there is none.

    More memory never costs time.
    """
    results = frontier(
        _settings(AUTO, source, replace(request, memory_limit=None)),
        ranks=source.ranks,
        microbatches=source.microbatches,
        memory_limits=limits,
        objective=request.objective,
        effort=request.effort,
    )
    return [found.timeline if isinstance(found, SearchResult) else found for found in results]


def _settings(name: str, source: CostSource, request: ScheduleRequest) -> list[Setting]:
    given = request.stages_per_rank or source.stages_per_rank
    return [
        Setting(stages, placement, source.costs(stages), request.memory_limit, source.vocabulary)
        for stages, placement in stages_and_placements(name, given, request.placement)
    ]
