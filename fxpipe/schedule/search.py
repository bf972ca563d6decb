"""``schedule="auto"``: the fastest schedule over families, placements and stages per rank, then improved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from fxpipe.errors import ScheduleError
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.families import FAMILIES, Family, build, starts
from fxpipe.schedule.goal import Objective as Objective
from fxpipe.schedule.ops import Order, Schedule
from fxpipe.schedule.placement import place
from fxpipe.schedule.problem import Limit, Problem, per_rank
from fxpipe.schedule.shop import shop
from fxpipe.schedule.simulator import simulate
from fxpipe.schedule.synthesis import synthesise
from fxpipe.schedule.timeline import Timeline
from fxpipe.schedule.vocabulary import body_costs, room_for_body, weave
from fxpipe.vocabulary.stages import Vocabulary

SEARCHED = "zb"
"""The family whose synthesis stands for all that are searched: the others are its cases."""

_FINALISTS = 2
_FIRST, _LAST = 0.5, 2.0  # effort on all settings, on the finalists


@dataclass(frozen=True)
class Setting:
    """Stages on ranks, what they cost there, and what memory there is for activations (``limits``).

    ``stages_per_rank`` are the model's own; with ``vocabulary`` the costs are of its stages as well.
    """

    stages_per_rank: int
    placement: str
    costs: Costs
    limits: Limit = None
    vocabulary: Vocabulary | None = None


@dataclass(frozen=True)
class Tried:
    """What became of a family in a setting; ``why`` it was left out, empty if it fits the memory limit.

    The bubble is of the span, the peak that of the rank that needs the most.
    """

    name: str
    setting: Setting
    seconds: float | None
    span_bubble: float | None
    peak_memory: float | None
    why: str


@dataclass(frozen=True)
class Choice:
    schedule: Schedule
    setting: Setting
    timeline: Timeline
    tried: tuple[Tried, ...]


@dataclass(frozen=True)
class _Entry:
    """``order`` is of the model's own stages."""

    key: tuple[float, float, float]
    setting: Setting
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
    costs' ``saved``, holds for all settings, beside their own limits.  First every family is tried in
    every setting, with a short synthesis; then the settings that did best get a long one.
    Raises ScheduleError where nothing fits, with the smallest limit that does.
    """
    if not settings:
        raise ScheduleError("nothing to search: give at least one setting")
    problems = [_problem(setting, ranks, microbatches, memory_limit) for setting in settings]
    tried: list[Tried] = []
    entries: list[_Entry] = []
    for setting, problem in zip(settings, problems, strict=True):
        for family in FAMILIES.values():
            if not family.has(setting.stages_per_rank, setting.placement):
                continue
            if family.is_searched and family.name != SEARCHED:
                continue
            try:
                order = _order(family, problem, objective, _FIRST / len(settings))
            except ScheduleError as error:
                tried.append(Tried(family.name, setting, None, None, None, str(error)))
                continue
            entry = _entry(family.name, problem, order, setting, memory_limit, objective)
            entries.append(entry)
            tried.append(_tried(entry))
    if not entries:
        raise ScheduleError(_nothing_fits(problems))
    for entry in _best_of_settings(entries):
        problem = problems[settings.index(entry.setting)]
        order = _synthesise(problem, (entry.order,), objective, _LAST / _FINALISTS)
        entries.append(_entry(SEARCHED, problem, order, entry.setting, memory_limit, objective))
    best = min(entries, key=lambda entry: entry.key)
    return Choice(best.timeline.schedule, best.setting, best.timeline, tuple(tried))


def _problem(setting: Setting, ranks: int, microbatches: int, limit: Limit) -> Problem:
    """What is sought for the model's own stages."""
    limits, costs = _limits(setting, limit, ranks), setting.costs
    if setting.vocabulary is not None:
        limits = room_for_body(costs, setting.vocabulary, limits)
        costs = body_costs(costs, setting.vocabulary)
    v, shape = setting.stages_per_rank, setting.placement
    return Problem(SEARCHED, ranks, microbatches, v, shape, costs, limits)


def _limits(setting: Setting, limit: Limit, ranks: int) -> tuple[float, ...]:
    return tuple(map(min, per_rank(limit, ranks), per_rank(setting.limits, ranks)))


def _order(family: Family, problem: Problem, objective: Objective, effort: float) -> Order:
    if family.is_searched:
        return _synthesise(problem, starts(problem), objective, effort)
    return build(
        family.name,
        ranks=problem.ranks,
        microbatches=problem.microbatches,
        costs=problem.costs,
        stages_per_rank=problem.stages_per_rank,
        placement=problem.shape,
        memory_limit=problem.limits,
    ).order


def _synthesise(problem: Problem, orders: Sequence[Order], objective: Objective, effort: float) -> Order:
    return synthesise(replace(problem, effort=effort), orders, objective)


def _entry(
    name: str, problem: Problem, order: Order, setting: Setting, limit: Limit, objective: Objective
) -> _Entry:
    placement, whole, vocabulary = problem.placement, order, setting.vocabulary
    if vocabulary is not None:
        limits = _limits(setting, limit, problem.ranks)
        whole = weave(problem, order, setting.costs, vocabulary, limits, objective)
        placement = vocabulary.placement(placement)
    timeline = simulate(Schedule(name, placement, problem.microbatches, whole, vocabulary), setting.costs)
    seconds, span, peak = (
        float(f"{x:.9g}") for x in (timeline.seconds, timeline.span, max(timeline.peak_memory))
    )
    key = (seconds, peak, span) if objective == "makespan" else (span, seconds, peak)
    return _Entry(key, setting, timeline, order)


def _tried(entry: _Entry) -> Tried:
    timeline = entry.timeline
    return Tried(
        timeline.schedule.name,
        entry.setting,
        timeline.seconds,
        timeline.span_bubble,
        max(timeline.peak_memory),
        "",
    )


def _best_of_settings(entries: Sequence[_Entry]) -> list[_Entry]:
    """The best entry of each of the settings that did best."""
    best: list[_Entry] = []
    for entry in sorted(entries, key=lambda entry: entry.key):
        if all(entry.setting is not other.setting for other in best):
            best.append(entry)
    return best[:_FINALISTS]


def _nothing_fits(problems: Sequence[Problem]) -> str:
    least, at = inf, problems[0]
    for problem in problems:
        flat = shop(problem.costs, place(problem.shape, problem.ranks, problem.stages_per_rank))
        needed = max(flat.smallest_limit(rank) for rank in range(problem.ranks))
        if needed < least:
            least, at = needed, problem
    return (
        f"no schedule keeps the memory limit of {max(min(p.limits) for p in problems):g}; the smallest that "
        f"one can keep is {least:g}, with {at.stages_per_rank} stages per rank in {at.shape} placement. To "
        f"need less, offload or recompute activations, make microbatches smaller, or use more stages per rank"
    )
