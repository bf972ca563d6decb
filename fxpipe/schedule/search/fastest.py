"""The candidate schedules and the fastest of them, for ``fxpipe.compile`` and the command line alike."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.errors import ScheduleError
from fxpipe.schedule.families.registry import FAMILIES, build
from fxpipe.schedule.goal import Objective
from fxpipe.schedule.offload.planner import with_offload
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.placement import PLACEMENTS
from fxpipe.schedule.problem import per_rank
from fxpipe.schedule.search.auto import SearchResult, Setting, limits_and_shares, search
from fxpipe.schedule.simulation.simulator import simulate

AUTO = "auto"
"""The schedule that is the fastest of all candidates."""

STAGES_PER_RANK = (1, 2, 4)
"""The candidate numbers of stages a rank of ``auto``."""


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
    settings: Sequence[Setting],
    *,
    ranks: int,
    microbatches: int,
    objective: Objective = "makespan",
    effort: float | None = None,
) -> SearchResult:
    """The setting in which the schedule is the fastest; with ``AUTO`` the fastest schedule of all settings.

    A given schedule has one setting.  Raises ScheduleError where nothing fits: for a family by name, with the
    reason of the last setting.
    """
    if schedule == AUTO:
        return search(settings, ranks=ranks, microbatches=microbatches, objective=objective, effort=effort)
    found: list[SearchResult] = []
    errors: list[ScheduleError] = []
    for setting in settings:
        limits = per_rank(setting.limits, ranks)
        given = isinstance(schedule, Schedule)
        kinds = [(limits, setting.offload)] if given else limits_and_shares(limits, setting.offload)
        for allowed, share in kinds:
            try:
                if isinstance(schedule, Schedule):
                    made = schedule
                else:
                    made = build(
                        schedule,
                        ranks=ranks,
                        microbatches=microbatches,
                        costs=setting.costs,
                        stages_per_rank=setting.stages_per_rank,
                        placement=setting.placement,
                        memory_limit=allowed,
                        effort=effort,
                        vocabulary=setting.vocabulary,
                    )
                timeline = simulate(made, setting.costs)
                if share is not None:
                    timeline = with_offload(timeline, share, limits)
            except ScheduleError as error:
                errors.append(error)
            else:
                found.append(SearchResult(timeline, setting))
    if not found:
        raise errors[-1]
    return min(found, key=lambda result: result.timeline.seconds)
