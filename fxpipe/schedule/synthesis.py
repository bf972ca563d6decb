"""Schedules made for the costs at hand, under memory limits.

A repeated block gives due dates, list scheduling makes an order of them, and the recipes for how the block
is entered and left evolve: the best are varied and mixed.  The winners' orders are then improved in place.
A long step also takes the best order of a short one, stretched.

The search climbs: it does this under a low limit, then under a higher one with what it has, and so on.  The
limits that it works under are the same whatever limit is asked for, which is to say that nothing depends on
that but how far it climbs, and which of the orders it may give.  So more memory never costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, inf

from fxpipe.schedule.best import IMPROVED, Best
from fxpipe.schedule.dispatch import check_room, has_room
from fxpipe.schedule.evolution import Evolution
from fxpipe.schedule.goal import Objective
from fxpipe.schedule.ops import Order
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.recipe import Recipe
from fxpipe.schedule.rungs import Rung, at_rung, room, rungs
from fxpipe.schedule.seeds import LARGE, LARGE_CHUNKED, SEEDS
from fxpipe.schedule.shop import Coded, decode
from fxpipe.schedule.stretch import stretched

_COOK, _TRY = 200_000, 50_000_000
"""Ops that a rung may schedule for recipes, and may run again for tries: .1 and .3 seconds, about."""

_COOK_LARGE = 200_000
"""The same for a large problem, for which nothing can be tried in the time."""

_STRETCH = 450_000
"""Ops that a rung may schedule for a long step from a short one's order."""

_LARGE = 8_000  # ops of a problem beyond which it is a large one
_TRIES = 30  # on a rung, for every op; more are of little use
_SHORT = 3  # microbatches per rank beyond which a step is a long one
_MOST = 16  # recipes of a short step that are tried on the long one


@dataclass(frozen=True)
class Starts:
    """Makers of orders from which a synthesis may start: some whatever the limits are, some to fit them."""

    fixed: Callable[[Problem], Sequence[Coded]]
    fitted: Callable[[Problem], Sequence[Coded]]


def synthesise(problem: Problem, starts: Starts) -> Order:
    """The shortest span that is found within the limits: of the orders of ``starts``, and of new ones.

    With uneven costs also of those that it finds for their mean.  The same input gives the same order.
    Raises ScheduleError where a rank's limit is below what one microbatch takes on it.
    """
    ascent = Ascent(problem, starts, "span")
    path = rungs([problem])
    if ascent.leap(path):
        return ascent.order
    alike = [] if problem.is_even else [Ascent(problem.with_mean_costs(), starts, "span")]
    for rung in path:
        for other in alike:
            other.climb(rung)
        ascent.climb(rung, given=[other.best.top.coded for other in alike if other.best.top.value < inf])
    return ascent.order


class Ascent:
    """A search for a problem, rung by rung."""

    def __init__(self, problem: Problem, starts: Starts, objective: Objective) -> None:
        self.problem, self.starts = problem, starts
        self.is_large = problem.ops > _LARGE
        short = problem
        seeds: Sequence[Recipe] = SEEDS
        if self.is_large:
            seeds = LARGE if problem.stages_per_rank == 1 else LARGE_CHUNKED
        else:
            short = problem.like(microbatches=min(problem.microbatches, _SHORT * problem.ranks))
        is_whole = short.microbatches == problem.microbatches
        self.best = Best(problem, objective)
        self.of_short = self.best if is_whole else Best(short, objective)
        more = problem.microbatches - short.microbatches
        self.evolution = Evolution(short, self.of_short.goal, seeds, more)
        self.fixed = self.best.made(starts.fixed(problem))
        self.fixed_of_short = [] if is_whole else self.of_short.made(starts.fixed(short))
        self.room, self.reached = room(problem), 0.0

    @property
    def order(self) -> Order:
        """The best that keeps the limits.

        Raises ScheduleError where a rank's limit is below what one microbatch takes on it.
        """
        check_room(self.problem.shop, self.problem.limits)
        return decode(self.problem.shop, self.best.kept.coded, self.problem.microbatches)

    def climbs_to(self, rung: Rung) -> bool:
        """Is a search there of use?"""
        is_over = rung.memory > self.reached >= self.room * (1 - 1e-9)
        return not (self.best.is_met or is_over) and has_room(self.problem.shop, at_rung(self.problem, rung))

    def leap(self, path: Sequence[Rung]) -> bool:
        """Is there a start on the path that is as good as can be?  Then there is nothing to climb for."""
        top = Best(self.problem, self.best.goal.objective)
        for rung in path[-2:]:
            if rung.memory <= self.room * (1 + 1e-9):
                problem = self.problem.like(limits=at_rung(self.problem, rung))
                top.add(problem.limits, [*self.fixed, *top.made(self.starts.fitted(problem))], 0)
        if top.is_met:
            self.best = top
        return top.is_met

    def climb(self, rung: Rung, effort: float = 1.0, given: Sequence[Coded] = ()) -> None:
        """Searches on the last rung or the one above, and among the given orders; where that is of use."""
        if not self.climbs_to(rung):
            return
        self.reached, effort = rung.memory, effort * rung.share * self.problem.effort
        best, short, limits = self.best, self.of_short, at_rung(self.problem, rung)
        problem, like = self.problem.like(limits=limits), short.problem.like(limits=limits)
        found = self.evolution.under(limits, effort * (_COOK_LARGE if self.is_large else _COOK))
        orders = [*self.fixed, *best.made([*given, *self.starts.fitted(problem)])]
        good = [cooked.order for cooked in found if cooked.worth < inf]
        if short is best:
            best.add(limits, [*orders, *good], self._tries(problem, effort))
            return
        before, starts = short.top, [*self.fixed_of_short, *short.made(self.starts.fitted(like))]
        short.add(limits, [*good[:IMPROVED], *starts], self._tries(like, effort / 2))
        count = max(2, min(_MOST, int(effort * _COOK / problem.ops)))
        longer = [self.evolution.cook(cooked.recipe, problem) for cooked in found[:count]]
        if short.top is not before:
            most = ceil(effort * _STRETCH / problem.ops)
            longer += islice(stretched(short.top.coded, like.microbatches, problem), most)
        best.add(limits, [*orders, *best.made(longer)], self._tries(problem, effort / 2))

    def _tries(self, problem: Problem, effort: float) -> int:
        return 0 if self.is_large else int(min(effort * _TRY / problem.ops, _TRIES * problem.ops))
