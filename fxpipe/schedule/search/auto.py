"""``schedule="auto"``: the fastest schedule over all families, placements and stages per rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from fxpipe.errors import ScheduleError
from fxpipe.schedule.candidate import Candidate
from fxpipe.schedule.engine.arrays import decode
from fxpipe.schedule.engine.dispatch import check_one_microbatch_fits
from fxpipe.schedule.families.registry import Family, order_of
from fxpipe.schedule.offload.planner import keeps
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.problem import Limit, Problem
from fxpipe.schedule.search.goal import Objective as Objective
from fxpipe.schedule.search.pool import find
from fxpipe.schedule.search.results import Draft, Entry, Results
from fxpipe.schedule.search.ways import SEARCHED, Way, limits_of, ways_of
from fxpipe.schedule.search.ways import Setting as Setting
from fxpipe.schedule.simulation.timeline import Timeline

More = Callable[[float], Sequence[Setting]]
"""Further settings, given the objective of the best schedule before the search (inf if there is none)."""


@dataclass(frozen=True)
class SearchResult:
    """The fastest schedule, its setting, and all candidates; of a named schedule no candidates are kept."""

    timeline: Timeline
    setting: Setting
    tried: tuple[Candidate, ...] = ()

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule


def search(
    settings: Sequence[Setting],
    *,
    ranks: int,
    microbatches: int,
    memory_limit: Limit = None,
    objective: Objective = "makespan",
    effort: float | None = None,
    seed: int = 0,
    more: More | None = None,
) -> SearchResult:
    """The schedule with the least makespan, or the shortest span of a rank, within the memory limits.

    Among equally fast schedules, one that needs the least memory.  ``memory_limit``, in the unit of the
    costs' memory, holds for all settings in addition to their own limits.  Every family is built in every
    setting, and one search covers all settings (``effort``: see :func:`.pool.find`).  ``seed``: of its random
    numbers.  ``more``: asked for the settings that are worth making only if they can beat the best schedule
    that is built without a search.  Raises ScheduleError if no schedule fits, with the smallest limit that a
    schedule can keep.
    """
    (found,) = frontier(
        settings,
        ranks=ranks,
        microbatches=microbatches,
        memory_limits=[memory_limit],
        objective=objective,
        effort=effort,
        seed=seed,
        more=more,
    )
    if isinstance(found, ScheduleError):
        raise found
    return found


def frontier(
    settings: Sequence[Setting],
    *,
    ranks: int,
    microbatches: int,
    memory_limits: Sequence[Limit],
    objective: Objective = "makespan",
    effort: float | None = None,
    seed: int = 0,
    more: More | None = None,
) -> list[SearchResult | ScheduleError]:
    """The result of ``search`` under each limit, or the error that it raises.

    A schedule found under one limit is a candidate under every other limit that it keeps, so more memory
    never costs time.  ``effort`` is per limit.
    """
    if not settings:
        raise ScheduleError("nothing to search: give at least one setting")
    under: list[tuple[Entry, tuple[Candidate, ...]] | ScheduleError] = []
    for limit in memory_limits:
        ways = partial(ways_of, ranks=ranks, microbatches=microbatches, limit=limit)
        try:
            under.append(_under(ways, settings, more, objective, effort, seed))
        except ScheduleError as error:
            under.append(error)
    best = [own[0] for own in under if not isinstance(own, ScheduleError)]
    choices: list[SearchResult | ScheduleError] = []
    for own, limit in zip(under, memory_limits, strict=True):
        if isinstance(own, ScheduleError):
            choices.append(own)
            continue
        kept = [one for one in best if keeps(one.timeline, limits_of(one.way.setting, limit, ranks))]
        top = min((own[0], *kept), key=lambda entry: entry.key)
        choices.append(SearchResult(top.timeline, top.way.setting, own[1]))
    return choices


def _under(
    ways_in: Callable[[Setting], list[Way]],
    settings: Sequence[Setting],
    more: More | None,
    objective: Objective,
    effort: float | None,
    seed: int,
) -> tuple[Entry, tuple[Candidate, ...]]:
    """The best schedule of all ways in the settings, and all candidates.  Raises ScheduleError as ``search``
    does.

    A way is left out if its bound is above the best schedule so far; at first that is the best of those that
    are built by rule, in the way with the least bound.
    """
    results, drafts, bounds = Results(objective), list[Draft](), dict[Way, float]()

    def build_all(settings: Sequence[Setting]) -> None:
        ways = {way: way.bound(objective) for setting in settings for way in ways_in(setting)}
        drafts.extend(_built(ways, results))
        bounds.update(ways)

    build_all(settings)
    if more is not None:
        build_all(more(inf if results.best is None else results.best.key[0]))
    drafts += _searched(bounds, results, effort, seed)
    for draft in sorted(drafts, key=lambda draft: draft.least):
        if draft.way.is_extended and results.is_beaten(draft.least):
            why = f"not completed: by estimate {results.compared(draft.least)}"
            results.leave_out(draft.way, draft.family, why)
        else:
            results.complete(draft)
    if results.woven:
        results.anneal(effort, seed)
    if results.best is None:
        raise ScheduleError(_nothing_fits([*bounds], results.smallest))
    names = [(way, family.name) for way in bounds for family in way.families]
    return results.best, tuple(results.tried[name] for name in names)


def _built(bounds: Mapping[Way, float], results: Results) -> list[Draft]:
    """The orders that are built by rule, in the ways that are not beaten; the shortest order of each way is
    completed at once, in the way with the least bound first.

    bounds: of each way.
    """
    drafts = []
    for way in sorted(bounds, key=bounds.__getitem__):
        families = [family for family in way.families if not family.is_searched]
        if way.is_extended and results.is_beaten(bounds[way]):
            for family in families:
                results.leave_out(way, family.name, f"not built: {results.compared(bounds[way])}")
            continue
        own = [draft for family in families if (draft := _draft(way, family, results))]
        own.sort(key=lambda draft: draft.least)
        for draft in own[:1]:
            results.complete(draft)
        drafts += own[1:]
    return drafts


def _draft(way: Way, family: Family, results: Results) -> Draft | None:
    """An order of the family; None, with the reason in the results, where it cannot be built."""
    try:
        order = order_of(family, way.problem)
    except ScheduleError as error:
        results.leave_out(way, family.name, str(error))
        return None
    return Draft(family.name, way, order, way.least(order, results.objective))


def _searched(bounds: Mapping[Way, float], results: Results, effort: float | None, seed: int) -> list[Draft]:
    """The orders that the search finds, in the ways that are not beaten; ``bounds``: of each way."""
    able = []
    for way in bounds:
        try:
            check_one_microbatch_fits(way.problem.arrays, way.problem.limits)
        except ScheduleError as error:
            results.leave_out(way, SEARCHED, str(error))
            continue
        if results.is_beaten(bounds[way]):
            results.leave_out(way, SEARCHED, f"not searched: {results.compared(bounds[way])}")
        else:
            able.append(way)
    drafts = []
    for is_beyond in (False, True):
        alike = [way for way in able if (way.offload is not None) == is_beyond]
        problems = [way.problem for way in alike]
        found = find(problems, results.objective, effort, seed) if alike else []
        for way, one in zip(alike, found, strict=True):
            assert one is not None, "the search has an order where a microbatch fits"
            order = decode(way.problem.arrays, one.order, way.problem.microbatches)
            drafts.append(Draft(SEARCHED, way, order, way.least(order, results.objective)))
    return drafts


def _nothing_fits(ways: Sequence[Way], offloaded: float) -> str:
    """``offloaded``: the smallest limit that can be kept with as much offload as possible."""

    def needed(problem: Problem) -> float:
        return max(map(problem.arrays.smallest_limit, range(problem.ranks)))

    at = min((way.problem for way in ways), key=needed)
    limit = max(min(way.limits) for way in ways)
    if offloaded < needed(at):
        found = f"{offloaded:g}, with as much offload as the links carry. To need less, recompute activations"
    else:
        shape = f"{at.stages_per_rank} stages per rank in {at.shape} placement"
        found = f"{needed(at):g}, with {shape}. To need less, offload or recompute activations"
    return (
        f"no schedule keeps the memory limit of {limit:g}; the smallest that one can keep is {found}, make "
        "microbatches smaller, or use more stages per rank"
    )
