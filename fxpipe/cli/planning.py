"""From a request to simulated schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.cli.sources import CostSource
from fxpipe.errors import ScheduleError
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.memory_text import MemoryText
from fxpipe.schedule.ops import Objective
from fxpipe.schedule.problem import Problem, per_rank
from fxpipe.schedule.search.auto import frontier
from fxpipe.schedule.search.fastest import AUTO, fastest, stages_and_placements, unknown_schedule
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
        raise ScheduleError(unknown_schedule(name))
    return fastest(name, _problems(name, source, request), effort=request.effort).timeline


def plan_within(
    limits: Sequence[float | None], source: CostSource, request: ScheduleRequest
) -> list[Timeline | ScheduleError]:
    """The result of the search under each memory limit, or the reason that there is none.

    More memory never costs time.
    """
    results = frontier(_problems(AUTO, source, request), limits, effort=request.effort)
    return [result if isinstance(result, ScheduleError) else result.timeline for result in results]


def _problems(name: str, source: CostSource, request: ScheduleRequest) -> list[Problem]:
    chunks = request.stages_per_rank or source.stages_per_rank
    return [
        Problem(
            source.ranks,
            source.microbatches,
            stages,
            shape,
            source.costs(stages),
            per_rank(request.memory_limit, source.ranks),
            source.vocabulary,
            objective=request.objective,
            text=MemoryText(source.units),
        )
        for stages, shape in stages_and_placements(name, chunks, request.placement)
    ]
