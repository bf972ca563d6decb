"""``schedule="auto"``: the fastest schedule over all families, placements and stages per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from fxpipe.errors import LimitError, ScheduleError
from fxpipe.schedule.arrays import decode, encode, run, schedule_arrays
from fxpipe.schedule.candidate import Candidate
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.dispatch import check_one_microbatch_fits, one_microbatch_fits
from fxpipe.schedule.families.registry import FAMILIES, Family, order_of
from fxpipe.schedule.goal import Objective as Objective
from fxpipe.schedule.offload.planner import AUTO, Share, keeps, with_offload
from fxpipe.schedule.ops import Order, Schedule
from fxpipe.schedule.problem import Limit, Problem, per_rank
from fxpipe.schedule.search.pool import Found, find
from fxpipe.schedule.search.starts import starts
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.schedule.vocabulary import budget_for_model_stages, model_stage_costs, weave
from fxpipe.vocabulary.stages import Vocabulary

SEARCHED = "zb"
"""The family that is searched in place of all searched families: the others are cases of it."""

BEYOND = tuple(f for f in FAMILIES.values() if f.name == SEARCHED or not f.is_searched)
WITHIN = tuple(f for f in BEYOND if not f.for_offload)


Limits = tuple[float, ...]
"""A memory limit for each rank, infinite for no limit."""


@dataclass(frozen=True, eq=False)
class Setting:
    """Stages on ranks, their costs there, and the memory for activations (``limits``).

    ``stages_per_rank`` are the model's own; with ``vocabulary`` the costs are of its stages as well.
    ``offload``: the share to offload over the costs' link.  ``recompute``: the level of recomputation in the
    costs.
    """

    stages_per_rank: int
    placement: str
    costs: Costs
    limits: Limit = None
    vocabulary: Vocabulary | None = None
    offload: Share = None
    recompute: str = ""


@dataclass(frozen=True)
class SearchResult:
    """The fastest schedule, its setting, and all candidates; of a named schedule no candidates are kept."""

    timeline: Timeline
    setting: Setting
    tried: tuple[Candidate, ...] = ()

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule


@dataclass(frozen=True, eq=False)
class _Way:
    """A setting with the problem of its model's own stages, and the share to offload afterwards."""

    setting: Setting
    problem: Problem
    limits: Limits
    offload: Share
    families: tuple[Family, ...]

    @property
    def is_extended(self) -> bool:
        """Are vocabulary stages or transfers added to an order of the model's stages?"""
        return self.setting.vocabulary is not None or self.offload is not None

    @cached_property
    def work(self) -> float:
        """Seconds of the busiest rank, vocabulary stages included."""
        placement, vocabulary = self.problem.placement, self.setting.vocabulary
        placement = placement if vocabulary is None else vocabulary.placement(placement)
        return self.problem.microbatches * schedule_arrays(self.setting.costs, placement).period

    def least(self, order: Order, objective: Objective) -> float:
        """An estimate from below of the order's seconds when it is extended.

        No bound: where vocabulary stages are added, list scheduling may change the order.
        """
        m = self.problem.microbatches
        done = run(self.problem.arrays, encode(order, m), m)
        if done is None:  # the arrays need the stages of a rank in the model's order, which the costs do not
            return self.work
        return max(self.work, done.makespan if objective == "makespan" else done.span)


def search(
    settings: Sequence[Setting],
    *,
    ranks: int,
    microbatches: int,
    memory_limit: Limit = None,
    objective: Objective = "makespan",
    effort: float | None = None,
    seed: int = 0,
) -> SearchResult:
    """The schedule with the least makespan, or the shortest span of a rank, within the memory limits.

    Among equally fast schedules, one that needs the least memory.  ``memory_limit``, in the unit of the
    costs' memory, holds for all settings in addition to their own limits.  Every family is built in every
    setting, and one search covers all settings (``effort``: see :func:`.pool.find`).  ``seed``: of its random
    numbers.  Raises ScheduleError if no schedule fits, with the smallest limit that a schedule can keep.
    """
    (found,) = frontier(
        settings,
        ranks=ranks,
        microbatches=microbatches,
        memory_limits=[memory_limit],
        objective=objective,
        effort=effort,
        seed=seed,
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
) -> list[SearchResult | ScheduleError]:
    """The result of ``search`` under each limit, or the error that it raises.

    A schedule found under one limit is a candidate under every other limit that it keeps, so more memory
    never costs time.  ``effort`` is per limit.
    """
    if not settings:
        raise ScheduleError("nothing to search: give at least one setting")
    under: list[SearchResult | ScheduleError] = []
    for limit in memory_limits:
        ways = [way for setting in settings for way in _ways(setting, ranks, microbatches, limit)]
        try:
            under.append(_under(ways, objective, effort, seed))
        except ScheduleError as error:
            under.append(error)
    best = [own for own in under if not isinstance(own, ScheduleError)]
    choices: list[SearchResult | ScheduleError] = []
    for own, limit in zip(under, memory_limits, strict=True):
        if isinstance(own, ScheduleError):
            choices.append(own)
            continue
        kept = [one for one in best if keeps(one.timeline, _limits(one.setting, limit, ranks))]
        top = min((own, *kept), key=lambda one: _key(one.timeline, objective))
        choices.append(replace(top, tried=own.tried))
    return choices


def _under(ways: Sequence[_Way], objective: Objective, effort: float | None, seed: int) -> SearchResult:
    """The best schedule of the ways, and all candidates.  Raises ScheduleError as ``search`` does."""
    found: dict[_Way, Found | None] = {}
    for is_beyond in (False, True):
        alike = [way for way in ways if (way.offload is not None) == is_beyond]
        problems = [way.problem for way in alike]
        if any(one_microbatch_fits(problem.arrays, problem.limits) for problem in problems):
            found |= zip(alike, find(problems, starts, objective, effort, seed), strict=True)
    # Orders of the model's own stages, each with an estimate of its seconds when it is extended.
    drafts: list[tuple[float, _Way, str, Order]] = []
    tried: dict[tuple[_Way, str], Candidate] = {}
    for way in ways:
        for family in way.families:
            if not family.has(way.setting.stages_per_rank, way.setting.placement):
                continue
            tried[way, family.name] = candidate = _candidate(family.name, way.setting)
            try:
                order = (
                    _decoded(way.problem, found.get(way))
                    if family.is_searched
                    else order_of(family, way.problem)
                )
            except ScheduleError as error:
                tried[way, family.name] = replace(candidate, why=str(error))
            else:
                drafts.append((way.least(order, objective), way, family.name, order))
    best: SearchResult | None = None
    smallest = inf
    for least, way, name, order in sorted(drafts, key=lambda draft: draft[0]):
        time = inf if best is None else _key(best.timeline, objective)[0]
        if way.is_extended and least > time:
            why = f"not completed: it takes {least:g} or more, by estimate; another takes {time:g}"
            tried[way, name] = replace(tried[way, name], why=why)
            continue
        try:
            timeline = _completed(name, way, order, objective)
        except ScheduleError as error:
            if isinstance(error, LimitError):
                smallest = min(smallest, error.smallest)
            tried[way, name] = replace(tried[way, name], why=str(error))
            continue
        tried[way, name] = replace(
            tried[way, name],
            seconds=timeline.seconds,
            span_bubble=timeline.span_bubble,
            peak_memory=max(timeline.peak_memory),
            offloaded=timeline.moved,
        )
        if best is None or _key(timeline, objective) < _key(best.timeline, objective):
            best = SearchResult(timeline, way.setting)
    if best is None:
        raise ScheduleError(_nothing_fits(ways, smallest))
    return replace(best, tried=tuple(tried.values()))


def limits_and_shares(limits: Limits, offload: Share) -> list[tuple[Limits, Share]]:
    """The memory limits to build a schedule for, each with the share to offload then.

    Within the limits without offload, or without limits and with as much offload as they then need.
    """
    free = (inf,) * len(limits)
    if offload is None or (offload == AUTO and limits == free):
        return [(limits, None)]
    return [(limits, None), (free, AUTO)] if offload == AUTO else [(free, offload)]


def _ways(setting: Setting, ranks: int, microbatches: int, limit: Limit) -> list[_Way]:
    """The ways to keep the limits; beyond them also the search under twice the limits."""
    limits = _limits(setting, limit, ranks)

    def way(allowed: Limits, share: Share, families: tuple[Family, ...]) -> _Way:
        problem = _problem(setting, ranks, microbatches, allowed)
        return _Way(setting, problem, limits, share, families)

    kinds = limits_and_shares(limits, setting.offload)
    ways = [way(allowed, share, WITHIN if share is None else BEYOND) for allowed, share in kinds]
    if len(kinds) > 1:
        ways.append(way(tuple(2 * x for x in limits), AUTO, (FAMILIES[SEARCHED],)))
    return ways


def _problem(setting: Setting, ranks: int, microbatches: int, limits: Limits) -> Problem:
    """The problem of the model's own stages: without vocabulary stages, and with the memory they leave."""
    costs = setting.costs
    if setting.vocabulary is not None:
        limits = budget_for_model_stages(costs, setting.vocabulary, limits)
        costs = model_stage_costs(costs, setting.vocabulary)
    v, shape = setting.stages_per_rank, setting.placement
    return Problem(SEARCHED, ranks, microbatches, v, shape, costs, limits)


def _limits(setting: Setting, limit: Limit, ranks: int) -> Limits:
    return tuple(map(min, per_rank(limit, ranks), per_rank(setting.limits, ranks)))


def _decoded(problem: Problem, found: Found | None) -> Order:
    """The order that the search found.  Raises ScheduleError if one microbatch does not fit."""
    if found is None:
        check_one_microbatch_fits(problem.arrays, problem.limits)
    assert found is not None, "the search has an order where a microbatch fits"
    return decode(problem.arrays, found.order, problem.microbatches)


def _completed(name: str, way: _Way, order: Order, objective: Objective) -> Timeline:
    """The order with its vocabulary stages and transfers, simulated."""
    setting, problem = way.setting, way.problem
    placement, vocabulary = problem.placement, setting.vocabulary
    if vocabulary is not None:
        limits = way.limits if way.offload is None else (inf,) * problem.ranks
        order = weave(problem, order, setting.costs, vocabulary, limits, objective)
        placement = vocabulary.placement(placement)
    timeline = simulate(Schedule(name, placement, problem.microbatches, order, vocabulary), setting.costs)
    return timeline if way.offload is None else with_offload(timeline, way.offload, way.limits)


def _key(timeline: Timeline, objective: Objective) -> tuple[float, ...]:
    """The objective, and what decides between equally fast schedules."""
    numbers = (timeline.seconds, timeline.span, max(timeline.peak_memory))
    seconds, span, peak = (float(f"{x:.9g}") for x in numbers)
    moved = timeline.moved
    return (seconds, moved, peak, span) if objective == "makespan" else (span, seconds, moved, peak)


def _candidate(name: str, setting: Setting) -> Candidate:
    barriers = 0 if setting.vocabulary is None else setting.vocabulary.barriers
    shape = setting.stages_per_rank, setting.placement
    return Candidate(name, *shape, barriers=barriers, recompute=setting.recompute)


def _nothing_fits(ways: Sequence[_Way], offloaded: float) -> str:
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
