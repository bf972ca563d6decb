"""``schedule="auto"``: the fastest schedule over families, placements and stages per rank, then improved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from fxpipe.errors import LimitError, ScheduleError
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.families import FAMILIES, STARTS, Family, build
from fxpipe.schedule.goal import Objective as Objective
from fxpipe.schedule.offload import AUTO, Share, lightened
from fxpipe.schedule.ops import Order, Schedule
from fxpipe.schedule.placement import place
from fxpipe.schedule.problem import Limit, Problem, per_rank
from fxpipe.schedule.rungs import rungs
from fxpipe.schedule.shop import shop
from fxpipe.schedule.simulator import simulate
from fxpipe.schedule.synthesis import Ascent
from fxpipe.schedule.timeline import Timeline
from fxpipe.schedule.vocabulary import body_costs, room_for_body, weave
from fxpipe.vocabulary.stages import Vocabulary

SEARCHED = "zb"
"""The family whose synthesis stands for all that are searched: the others are its cases."""

BEYOND = tuple(f for f in FAMILIES.values() if f.name == SEARCHED or not f.is_searched)
WITHIN = tuple(f for f in BEYOND if not f.for_offload)

_LIGHT, _HEAVY = 0.045, 0.1  # effort on a rung for all ways, and for the one that does best there
_MORE = 20  # times as much for a large problem, which takes less by itself


@dataclass(frozen=True)
class Setting:
    """Stages on ranks, what they cost there, and what memory there is for activations (``limits``).

    ``stages_per_rank`` are the model's own; with ``vocabulary`` the costs are of its stages as well.
    ``offload``: what may leave the ranks over the costs' link.
    """

    stages_per_rank: int
    placement: str
    costs: Costs
    limits: Limit = None
    vocabulary: Vocabulary | None = None
    offload: Share = None


@dataclass(frozen=True)
class Tried:
    """What became of a family in a setting; ``why`` it was left out, empty if it fits the memory limit.

    The bubble is of the span, the peak that of the rank that needs the most; ``moved`` is what leaves the
    ranks.
    """

    name: str
    setting: Setting
    seconds: float | None
    span_bubble: float | None
    peak_memory: float | None
    why: str
    moved: float = 0.0


@dataclass(frozen=True)
class Choice:
    schedule: Schedule
    setting: Setting
    timeline: Timeline
    tried: tuple[Tried, ...]


@dataclass(frozen=True, eq=False)
class _Way:
    """A setting with what is sought in it; what is to leave the ranks comes on top."""

    setting: Setting
    problem: Problem
    limits: tuple[float, ...]
    offload: Share
    families: tuple[Family, ...]


@dataclass(frozen=True)
class _Entry:
    """``order`` is of the model's own stages."""

    key: tuple[float, float, float, float]
    way: _Way
    timeline: Timeline
    order: Order


def search(
    settings: Sequence[Setting],
    *,
    ranks: int,
    microbatches: int,
    memory_limit: Limit = None,
    objective: Objective = "makespan",
) -> Choice:
    """The schedule with the least makespan, or the shortest span of a rank, within the memory limits.

    Of those that are equally fast one that needs the least memory.  ``memory_limit``, in the unit of the
    costs' ``saved``, holds for all settings, beside their own limits.  Every family is tried in every
    setting, and the searches in all settings climb together.
    Raises ScheduleError where nothing fits, with the smallest limit that does.
    """
    if not settings:
        raise ScheduleError("nothing to search: give at least one setting")
    ways = [way for setting in settings for way in _ways(setting, ranks, microbatches, memory_limit)]
    tried: list[Tried] = []
    entries: list[_Entry] = []
    smallest = inf
    ascents = {way: Ascent(way.problem, STARTS, objective) for way in ways}
    for is_beyond in (False, True):
        _climb([ascents[way] for way in ways if (way.offload is not None) == is_beyond])
    for way in ways:
        for family in way.families:
            if not family.has(way.setting.stages_per_rank, way.setting.placement):
                continue
            try:
                order = ascents[way].order if family.is_searched else _build(family, way.problem)
                entry = _entry(family.name, way, order, objective)
            except ScheduleError as error:
                if isinstance(error, LimitError):
                    smallest = min(smallest, error.smallest)
                tried.append(Tried(family.name, way.setting, None, None, None, str(error)))
                continue
            entries.append(entry)
            tried.append(_tried(entry))
    if not entries:
        raise ScheduleError(_nothing_fits(ways, smallest))
    best = min(entries, key=lambda entry: entry.key)
    return Choice(best.timeline.schedule, best.way.setting, best.timeline, tuple(tried))


def _ways(setting: Setting, ranks: int, microbatches: int, limit: Limit) -> list[_Way]:
    """Within the limits as it is; or beyond them, with as much away as it then takes."""
    limits, free = _limits(setting, limit, ranks), (inf,) * ranks

    def way(allowed: tuple[float, ...], share: Share, families: tuple[Family, ...]) -> _Way:
        problem = _problem(setting, ranks, microbatches, allowed)
        return _Way(setting, problem, limits, share, families)

    if setting.offload is None or (setting.offload == AUTO and limits == free):
        return [way(limits, None, WITHIN)]
    beyond = way(free, setting.offload, BEYOND)
    if setting.offload != AUTO:
        return [beyond]
    twice = way(tuple(2 * x for x in limits), AUTO, (FAMILIES[SEARCHED],))
    return [way(limits, None, WITHIN), beyond, twice]


def _problem(setting: Setting, ranks: int, microbatches: int, limits: tuple[float, ...]) -> Problem:
    """What is sought for the model's own stages."""
    costs = setting.costs
    if setting.vocabulary is not None:
        limits = room_for_body(costs, setting.vocabulary, limits)
        costs = body_costs(costs, setting.vocabulary)
    v, shape = setting.stages_per_rank, setting.placement
    return Problem(SEARCHED, ranks, microbatches, v, shape, costs, limits)


def _limits(setting: Setting, limit: Limit, ranks: int) -> tuple[float, ...]:
    return tuple(map(min, per_rank(limit, ranks), per_rank(setting.limits, ranks)))


def _climb(ascents: Sequence[Ascent]) -> None:
    """Rung by rung; where nothing is known of limits above, so that the result does not depend on them."""
    if not ascents:
        return
    path = rungs([ascent.problem for ascent in ascents])
    least = min(ascent.best.goal.bound for ascent in ascents)
    if any(ascent.leap(path) for ascent in ascents if ascent.best.goal.bound <= least * (1 + 1e-9)):
        path = path[-2:]  # nothing can be better: of the others any order will do that keeps the limit
    for rung in path:
        climbing = [ascent for ascent in ascents if ascent.climbs_to(rung)]
        for ascent in climbing:
            ascent.climb(rung, _effort(ascent, _LIGHT))
        if climbing:
            best = min(climbing, key=lambda ascent: ascent.best.top.value)
            best.climb(rung, _effort(best, _HEAVY))


def _effort(ascent: Ascent, effort: float) -> float:
    return effort * _MORE if ascent.is_large else effort


def _build(family: Family, problem: Problem) -> Order:
    return build(
        family.name,
        ranks=problem.ranks,
        microbatches=problem.microbatches,
        costs=problem.costs,
        stages_per_rank=problem.stages_per_rank,
        placement=problem.shape,
        memory_limit=problem.limits,
    ).order


def _entry(name: str, way: _Way, order: Order, objective: Objective) -> _Entry:
    setting, problem = way.setting, way.problem
    placement, whole, vocabulary = problem.placement, order, setting.vocabulary
    if vocabulary is not None:
        limits = way.limits if way.offload is None else (inf,) * problem.ranks
        whole = weave(problem, order, setting.costs, vocabulary, limits, objective)
        placement = vocabulary.placement(placement)
    timeline = simulate(Schedule(name, placement, problem.microbatches, whole, vocabulary), setting.costs)
    if way.offload is not None:
        timeline = lightened(timeline, way.offload, way.limits)
    seconds, span, peak = (
        float(f"{x:.9g}") for x in (timeline.seconds, timeline.span, max(timeline.peak_memory))
    )
    moved = timeline.moved
    key = (seconds, moved, peak, span) if objective == "makespan" else (span, seconds, moved, peak)
    return _Entry(key, way, timeline, order)


def _tried(entry: _Entry) -> Tried:
    timeline = entry.timeline
    return Tried(
        timeline.schedule.name,
        entry.way.setting,
        timeline.seconds,
        timeline.span_bubble,
        max(timeline.peak_memory),
        "",
        timeline.moved,
    )


def _nothing_fits(ways: Sequence[_Way], offloaded: float) -> str:
    """``offloaded``: the smallest limit that could be kept with as much away as possible."""
    least, at = inf, ways[0].problem
    for problem in (way.problem for way in ways):
        flat = shop(problem.costs, place(problem.shape, problem.ranks, problem.stages_per_rank))
        needed = max(flat.smallest_limit(rank) for rank in range(problem.ranks))
        if needed < least:
            least, at = needed, problem
    limit = max(min(way.limits) for way in ways)
    if offloaded < least:
        found = f"{offloaded:g}, with all offloaded that the links carry. To need less, recompute activations"
    else:
        shape = f"{at.stages_per_rank} stages per rank in {at.shape} placement"
        found = f"{least:g}, with {shape}. To need less, offload or recompute activations"
    return (
        f"no schedule keeps the memory limit of {limit:g}; the smallest that one can keep is {found}, make "
        "microbatches smaller, or use more stages per rank"
    )
