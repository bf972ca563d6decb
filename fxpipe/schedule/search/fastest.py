"""The candidate schedules and the fastest of them, for ``fxpipe.compile`` and the command line alike."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from fxpipe.errors import LimitError, ScheduleError, suggested
from fxpipe.schedule.candidate import SearchResult
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.offload.planner import with_offload
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.placement import PLACEMENTS
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.search.auto import More, search
from fxpipe.schedule.search.build import schedule_of
from fxpipe.schedule.search.variants import variants
from fxpipe.schedule.simulation.simulator import simulate

AUTO = "auto"
"""The schedule that is the fastest of all candidates."""

STAGES_PER_RANK = (1, 2, 4)
"""The candidate numbers of stages a rank of ``auto``."""


def unknown_schedule(name: object) -> str:
    """The message for a schedule that is no family's name."""
    names = (AUTO, *FAMILIES)
    return (
        f"Unknown schedule {name!r}.{suggested(name, names)} Known: {', '.join(names)}; or the path of a "
        "schedule as text."
    )


def stages_and_placements(
    schedule: str, stages_per_rank: int | None = None, placement: str | None = None
) -> tuple[tuple[int, str], ...]:
    """The candidate numbers of stages a rank, each with its candidate placements.

    schedule: ``AUTO``, or the name of a family, which has one of each.  The other arguments, where given, are
    the only candidates.
    """
    if schedule != AUTO:
        family = FAMILIES[schedule]
        return ((stages_per_rank or family.stages_per_rank, placement or family.placement),)
    return tuple(
        (stages, name)
        for stages in (STAGES_PER_RANK if stages_per_rank is None else (stages_per_rank,))
        # With one stage a rank all placements are the plain one.
        for name in ([placement] if placement else PLACEMENTS if stages > 1 else ["plain"])
    )


def fastest(
    schedule: str | Schedule,
    problems: Sequence[Problem],
    *,
    effort: float | None = None,
    more: More | None = None,
) -> SearchResult:
    """The problem in which the schedule is the fastest; with ``AUTO`` the fastest schedule of all problems.

    ``more``: see ``search``.  A given schedule has one problem.  Raises ScheduleError where nothing fits: for
    a family by name, with the smallest limit that a problem can keep, or the reason of the last one.
    """
    if schedule == AUTO:
        return search(problems, effort=effort, more=more)
    results: list[SearchResult] = []
    errors: list[ScheduleError] = []

    def attempt(problems: Sequence[Problem]) -> None:
        for problem in (variant for base in problems for variant in _variants(schedule, base)):
            try:
                made = schedule if isinstance(schedule, Schedule) else schedule_of(schedule, problem, effort)
                timeline = simulate(made, problem.costs)
                if problem.offload is not None:
                    timeline = with_offload(timeline, problem.offload, problem.limits, problem.text)
            except ScheduleError as error:
                errors.append(error)
            else:
                results.append(SearchResult(problem, timeline))

    attempt(problems)
    if more is not None:
        attempt(more(min((result.seconds for result in results), default=inf)))
    if not results:
        over = [error for error in errors if isinstance(error, LimitError)]
        raise min(over, key=lambda error: error.smallest) if over else errors[-1]
    return min(results, key=lambda result: result.seconds)


def _variants(schedule: str | Schedule, problem: Problem) -> list[Problem]:
    """The problems to try: within the limits without offload, or without limits and then with offload.  Of a
    given schedule, which cannot be built within the limits, the last alone."""
    candidates = [variant for variant in variants(problem) if variant.slack in (1, inf)]
    return candidates[-1:] if isinstance(schedule, Schedule) else candidates
