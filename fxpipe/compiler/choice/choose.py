"""The choice of a cut and a schedule: the fastest of the candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from math import inf
from typing import TypeVar

from fxpipe.compiler.choice.costing import Chosen, Costing, Placed, held_bytes
from fxpipe.compiler.choice.cut import Stages
from fxpipe.compiler.options import Settings
from fxpipe.errors import DeadlockError, LimitError, PartitionError, ScheduleError
from fxpipe.passes.level.recompute import Level
from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.candidate import SearchResult
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.problem import Problem, Setting
from fxpipe.schedule.search.comparison import row_of
from fxpipe.schedule.search.fastest import fastest
from fxpipe.schedule.simulation.simulator import simulate

_T = TypeVar("_T")

_WORTH = 0.97  # of the memory that is needed: with twice the parts it has to be less, or more are not tried


def choose(options: Settings, stages: Sequence[Stages], costing: Costing) -> Chosen:
    """The cut with the shortest simulated step on its ranks, and its schedule.

    Raises ScheduleError where no schedule keeps the memory limit.
    """
    first, *levels = costing.tried.levels
    by_setting: dict[Setting, tuple[Stages, Placed]] = {}  # by the problem's setting
    bounds: dict[Stages, float] = {}  # seconds, at the first level
    too_heavy: list[LimitError] = []

    def at_level(of: Stages, level: Level | None) -> list[Problem]:
        placed_problems, errors = _problems(options, of, costing, level)
        by_setting.update((problem.setting, (of, placed)) for placed, problem in placed_problems)
        too_heavy.extend(errors)
        if level == first and placed_problems:
            bounds[of] = _bound(placed_problems)
        return [problem for _, problem in placed_problems]

    def recomputing(beat: float) -> list[Problem]:
        """The other levels, of stages that can be as fast: recomputation adds to the work of each."""
        able = [of for of, bound in bounds.items() if bound <= beat]
        # Known only now; the display counts them in.
        costing.phase.expect(2 + 2 * len(able) * len(levels))
        return [problem for of in able for level in levels for problem in at_level(of, level)]

    without = [problem for of in stages for problem in at_level(of, first)]
    if not without:
        raise min(too_heavy, key=lambda error: error.smallest)
    result = fastest(options.schedule, without, effort=options.effort, more=recomputing if levels else None)
    of, placed = by_setting[result.problem.setting]
    chosen = Chosen(placed, result, held_bytes(placed, options))
    is_given = isinstance(options.schedule, Schedule)
    # The sections of other cuts would have to be measured, too.
    is_able = of.step.cut is not None and options.costs != "measured"
    return _with_other_cuts(options, of, costing, chosen) if is_able and not is_given else chosen


def _with_other_cuts(options: Settings, of: Stages, costing: Costing, chosen: Chosen) -> Chosen:
    """What was chosen, with other cuts where a step takes no longer with them."""
    # With balanced ranks other orders are fast; with lighter messages costs hardly change.
    for cut_again, searches in ((costing.balanced, True), (costing.lighter, False)):
        other = cut_again(of, chosen)
        if other is not None:
            better = _if_no_slower(options, other, costing, chosen, searches)
            of, chosen = (of, chosen) if better is None else (other, better)
    return chosen


def _if_no_slower(
    options: Settings, other: Stages, costing: Costing, chosen: Chosen, searches: bool
) -> Chosen | None:
    """The schedule on another cut; None if it takes longer, or as long with more memory.

    searches: also where the same order is no slower there, for one that is faster yet.
    """
    result = chosen.result
    for placed, problem in _problems(options, other, costing, chosen.placed.cut.options.recompute)[0]:
        others = _on_other_costs(result, problem, options.effort)
        able = (one for one in others if one.timeline.fits(problem.limits) and one.key < result.key)
        best = min(able, key=lambda one: one.key, default=None) if searches else next(able, None)
        if best is not None:
            # The table of candidates shows what is run, not what it was found with.
            row, before = row_of(best), row_of(result)
            tried = tuple(row if each == before else each for each in result.tried)
            return Chosen(placed, replace(best, tried=tried), held_bytes(placed, options))
    return None


def _on_other_costs(result: SearchResult, problem: Problem, effort: float | None) -> Iterator[SearchResult]:
    """Yield the order on these costs, if it moves nothing to the host, and that of its family for them."""
    if problem.offload is None:
        with suppress(DeadlockError):  # a value that skips stages goes another way in another cut
            yield SearchResult(problem, simulate(result.schedule, problem.costs))
    with suppress(ScheduleError):  # then the family has none within the limits
        yield fastest(result.schedule.name, [problem], effort=effort)


def with_uses(options: Settings, lanes: int, choose: Callable[[Settings], _T]) -> tuple[Settings, _T]:
    """What ``choose`` gives.  Parameters that replicas, or lanes, divide are gathered once a step if that
    keeps the limit, else for each use: of whole stages, or of 4, 8, … parts of each.  The options say which.
    """
    try:
        return options, choose(options)
    except ScheduleError:
        mesh = options.mesh
        if not mesh.divides_parameters or options.memory_limit is None or mesh.replicas * lanes == 1:
            raise
    options = replace(options, per_use=True)
    try:
        return options, choose(options)
    except LimitError as error:
        if options.parts != "auto":
            raise
        errors, smallest = [error], {error.is_least: error.smallest}
    for parts in (1 << k for k in count(2)):  # of two parts both would be there at once
        variant = replace(options, parts=parts)
        try:
            return variant, choose(variant)
        except PartitionError:
            break  # there are fewer places to cut
        except LimitError as error:
            errors.append(error)
            if error.smallest > _WORTH * smallest.get(error.is_least, inf):
                break  # what does not fit are not the parameters
            smallest[error.is_least] = error.smallest
    raise min(errors, key=lambda error: (error.is_least, error.smallest))


def choose_below(
    options: Settings, stages: Sequence[Stages], costing: Costing, beat: float
) -> Chosen | float:
    """``choose``, or seconds that no schedule beats, where these are not below ``beat``.

    Raises LimitError where not one microbatch fits, and ScheduleError as ``choose``.
    """
    if isinstance(options.schedule, Schedule):
        return choose(options, stages, costing)
    first, *levels = costing.tried.levels
    placed_problems, too_heavy = list[tuple[Placed, Problem]](), list[LimitError]()
    bounds = []  # of cuts that are as slow without a limit; recomputation adds to their work
    for of in stages:
        here, errors = _problems(options, of, costing, first)
        too_heavy += errors
        # More work cannot make it faster, so its other levels need not be made.
        if here and levels and _bound(here) >= beat:
            bounds.append(_bound(here))
            continue
        placed_problems += here
        for level in levels:
            placed_problems += _problems(options, of, costing, level)[0]
    able: dict[Problem, Placed] = {}
    for placed, problem in placed_problems:
        least = problem.arrays.smallest_joined
        # Known without a search, which would fail on it.
        if not problem.is_extended and any(a > b for a, b in zip(least, problem.limits, strict=True)):
            need = max(fixed.total + a for fixed, a in zip(held_bytes(placed, options), least, strict=True))
            too_heavy.append(LimitError("One microbatch needs more than the memory limit.", need))
        elif problem.bound >= beat:
            bounds.append(problem.bound)
        else:
            able[problem] = placed
    if not able and not bounds:
        raise min(too_heavy, key=lambda error: error.smallest)
    if not able:
        return min(bounds)
    best = fastest(options.schedule, [*able], effort=options.effort)
    placed = next(placed for problem, placed in able.items() if problem.setting == best.problem.setting)
    return Chosen(placed, best, held_bytes(placed, options))


def _bound(placed_problems: Sequence[tuple[Placed, Problem]]) -> float:
    """Seconds that no schedule beats, whatever memory it has."""
    return min(
        p.work if p.objective == "period" else lower_bound(p.costs, placed.ranks, p.microbatches)
        for placed, p in placed_problems
    )


def _problems(
    options: Settings, stages: Stages, costing: Costing, level: Level | None
) -> tuple[list[tuple[Placed, Problem]], list[LimitError]]:
    """The problems of a cut on all placements, and the reasons that others cannot keep the limit."""
    placed_problems, too_heavy = [], []
    for placed in costing(stages, level):
        try:
            placed_problems.append((placed, costing.problem(placed, options)))
        except LimitError as error:
            too_heavy.append(error)
    return placed_problems, too_heavy
