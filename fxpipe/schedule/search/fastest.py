"""The candidate schedules and the fastest of them, for ``fxpipe.compile`` and the command line alike."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from fxpipe.errors import LimitError, ScheduleError
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.offload.planner import AUTO as AS_NEEDED
from fxpipe.schedule.offload.planner import Share, with_offload
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.placement import PLACEMENTS
from fxpipe.schedule.problem import Limit, per_rank
from fxpipe.schedule.search.auto import More, SearchResult, Setting, search
from fxpipe.schedule.search.build import build
from fxpipe.schedule.search.goal import Objective
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
    more: More | None = None,
) -> SearchResult:
    """The setting in which the schedule is the fastest; with ``AUTO`` the fastest schedule of all settings.

    ``more``: see ``search``.  A given schedule has one setting.  Raises ScheduleError where nothing fits: for
    a family by name, with the smallest limit that a setting can keep, or the reason of the last one.
    """
    if schedule == AUTO:
        return search(
            settings, ranks=ranks, microbatches=microbatches, objective=objective, effort=effort, more=more
        )
    found: list[SearchResult] = []
    errors: list[ScheduleError] = []

    def attempt(settings: Sequence[Setting]) -> None:
        for setting in settings:
            for limits, share in _limits_and_shares(schedule, setting):
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
                            memory_limit=limits,
                            effort=effort,
                            vocabulary=setting.vocabulary,
                        )
                    timeline = simulate(made, setting.costs)
                    if share is not None:
                        timeline = with_offload(timeline, share, per_rank(setting.limits, ranks))
                except ScheduleError as error:
                    errors.append(error)
                else:
                    found.append(SearchResult(timeline, setting))

    attempt(settings)
    if more is not None:
        attempt(more(min((result.timeline.seconds for result in found), default=inf)))
    if not found:
        over = [error for error in errors if isinstance(error, LimitError)]
        raise min(over, key=lambda error: error.smallest) if over else errors[-1]
    return min(found, key=lambda result: result.timeline.seconds)


def _limits_and_shares(schedule: str | Schedule, setting: Setting) -> list[tuple[Limit, Share]]:
    """The memory limits to build a schedule for, each with the share to offload then.

    Within the setting's limits without offload, or without limits and with as much offload as they then need.
    """
    without: list[tuple[Limit, Share]] = [(setting.limits, None)]
    beyond: list[tuple[Limit, Share]] = [(None, setting.offload)]
    if setting.offload is None:
        return without
    if setting.offload != AS_NEEDED or isinstance(schedule, Schedule):
        return beyond
    return without + beyond
