"""Schedules made for the costs at hand, under memory limits.

A repeated block gives due dates, list scheduling makes an order of them, and the recipes for how the block
is entered and left evolve: the best are varied and mixed.  The winners' orders are then improved in place.
A long step also takes the best order of a short one, stretched.

The search climbs: it does this under a low limit, then under a higher one with what it has, and so on.  So
more memory never costs time, but for limits between the rungs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from random import Random

import numpy as np

from fxpipe.schedule.dispatch import check_room, dispatch
from fxpipe.schedule.goal import Goal, Objective
from fxpipe.schedule.improve import improve
from fxpipe.schedule.ops import Order
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.recipe import Kitchen, Recipe, cross, mutate, random_recipe
from fxpipe.schedule.rungs import rungs
from fxpipe.schedule.seeds import SEEDS
from fxpipe.schedule.shop import Coded, Run, decode, fits, run
from fxpipe.schedule.stretch import stretched

_COOK, _TRY = 200_000, 50_000_000
"""Ops that a rung may schedule for recipes, and may run again for tries: .1 and .3 seconds, about."""

_COOK_LARGE = 350_000
"""The same for a large problem, for which nothing can be tried in the time."""

_LARGE = 8_000  # ops of a problem beyond which the effort falls
_RECIPES, _TRIES = 1 / 6, 30  # on a rung, for every op; more are of little use
_POPULATION = 16
_NEW = 0.3  # of a rung's recipes, that are no children of others
_CARRIED = 4  # recipes that are taken along to the next rung
_SHORT = 3  # microbatches per rank up to which a step is no long one
_SHORTER = 1.5  # microbatches per rank of the short step, for a large problem
_BEST = 4  # orders that are improved
_STEPS, _STEPS_LARGE = (1 / 32, 1 / 16), (1 / 16, 1 / 4)  # between rungs, in ranks · M_B
_SEED = 2  # of those tried one with which no mark of benchmarks/schedules.py is missed: luck counts


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
    alike = [] if problem.is_even else [Ascent(problem.with_mean_costs(), starts, "span")]
    for limits in rungs(problem, *(_STEPS_LARGE if is_large(problem) else _STEPS)):
        if ascent.is_met:
            break
        for other in alike:
            if not other.is_met:
                other.climb(limits)
        ascent.climb(limits, given=[other.best.coded for other in alike])
    return ascent.order


def is_large(problem: Problem) -> bool:
    """Whether the problem has so many ops that a synthesis gets less effort for it."""
    return _ops(problem) > _LARGE


def _ops(problem: Problem) -> int:
    return problem.shop.sections * problem.microbatches


@dataclass(frozen=True, eq=False)
class _Made:
    """An order.  What counts is the objective, and of equals the value that is searched with."""

    coded: Coded
    objective: float = inf
    value: float = inf

    @property
    def key(self) -> tuple[float, float]:
        return self.objective, self.value


class Best:
    """The best order of a problem, under limits that rise."""

    def __init__(self, problem: Problem, objective: Objective) -> None:
        self.problem, self.goal = problem, Goal.of(problem, objective)
        self.made = _Made(np.zeros(0, np.int64))

    @property
    def coded(self) -> Coded:
        return self.made.coded

    @property
    def value(self) -> float:
        return self.made.value

    @property
    def is_met(self) -> bool:
        return self.goal.is_met(self.value)

    def add(self, limits: tuple[float, ...], orders: Iterable[Coded], tries: int) -> None:
        """Local search from the one that is here and from the best of those that keep the limits, which no
        order here breaks.  After each round the better half goes on."""
        shop, m = self.problem.shop, self.problem.microbatches
        found = self._distinct(self._made(coded) for coded in orders if fits(shop, coded, m, limits))[:_BEST]
        if self.value < inf:
            found = self._distinct([self.made, *found])
        self._keep(found)
        rounds = len(found).bit_length() if tries else 0
        for _ in range(rounds):
            each = tries // (rounds * len(found))
            better = partial(improve, shop, microbatches=m, limits=limits, goal=self.goal, tries=each)
            with ThreadPoolExecutor() as pool:
                orders = pool.map(better, [made.coded for made in found])
            found = self._distinct(map(self._made, orders))
            self._keep(found)
            found = found[: max(1, len(found) // 2)]

    def _keep(self, found: Iterable[_Made]) -> None:
        self.made = min((self.made, *found), key=lambda made: made.key)

    def _distinct(self, orders: Iterable[_Made]) -> list[_Made]:
        """Those of different value, the best first."""
        found: list[_Made] = []
        for made in sorted(orders, key=lambda made: made.value):
            if not found or made.value > found[-1].value * (1 + 1e-9):
                found.append(made)
        return found

    def _made(self, coded: Coded) -> _Made:
        done = ran(self.problem, coded)
        return _Made(coded, float(f"{self.goal.time(done):.12g}"), self.goal.value(done))


class Ascent:
    """A search for a problem, rung by rung.

    Raises ScheduleError where a rank's limit is below what one microbatch takes on it.
    """

    def __init__(self, problem: Problem, starts: Starts, objective: Objective) -> None:
        check_room(problem.shop, problem.limits)
        self.problem, self.starts = problem, starts
        large = is_large(problem)
        per_rank = _SHORTER if large else _SHORT
        short = problem.like(microbatches=min(problem.microbatches, ceil(per_rank * problem.ranks)))
        self.best, self.of_short = Best(problem, objective), Best(short, objective)
        if problem.microbatches <= _SHORT * problem.ranks:
            short, self.of_short = problem, self.best
        self.evolution = Evolution(short, self.of_short.goal, problem.microbatches - short.microbatches)
        self.share = problem.effort * min(1.0, _LARGE / _ops(problem))
        self.fixed = starts.fixed(problem)
        self.fixed_of_short = () if short is problem or large else starts.fixed(short)
        top = Best(problem, objective)
        top.add(problem.limits, [*self.fixed, *starts.fitted(problem)], 0)
        if top.is_met:  # then there is nothing to climb for
            self.best = top

    @property
    def order(self) -> Order:
        return decode(self.problem.shop, self.best.coded, self.problem.microbatches)

    @property
    def is_met(self) -> bool:
        """Is the best as good as can be?"""
        return self.best.is_met

    def climb(self, limits: tuple[float, ...], effort: float = 1.0, given: Sequence[Coded] = ()) -> None:
        """Searches under limits that no earlier ones exceed, and among the given orders."""
        best, short, share = self.best, self.of_short, effort * self.share
        problem, large = self.problem.like(limits=limits), is_large(self.problem)
        found = self.evolution.under(
            limits, effort * self.problem.effort * _COOK_LARGE if large else share * _COOK
        )
        orders = [*given, *self.fixed, *self.starts.fitted(problem)]
        if short is best:
            orders += [cooked.coded for cooked in found if cooked.value < inf][:_BEST]
        else:
            count = max(2, min(_POPULATION, int(share * _COOK / _ops(problem))))
            orders += [self.evolution.cook(cooked.recipe, problem) for cooked in found[:count]]
        if short is not best and not large:
            like = short.problem.like(limits=limits)
            from_short = [cooked.coded for cooked in found if cooked.value < inf][:_BEST]
            from_short += [*self.fixed_of_short, *self.starts.fitted(like)]
            before = short.coded
            short.add(limits, from_short, self._tries(like, share / 2))
            if short.coded is not before:
                orders += stretched(short.coded, like.microbatches, problem)
        best.add(limits, orders, self._tries(problem, share if short is best else share / 2))

    def _tries(self, problem: Problem, share: float) -> int:
        ops = _ops(problem)
        return 0 if is_large(self.problem) else int(min(share * _TRY / ops, _TRIES * ops))


@dataclass(frozen=True, eq=False)
class Cooked:
    """A recipe, the order that follows from it, and what that is worth: infinite where it breaks a limit."""

    value: float
    recipe: Recipe
    coded: Coded


class Evolution:
    """Recipes for a problem, or for one that has so many microbatches ``more``."""

    def __init__(
        self, problem: Problem, goal: Goal, more: int = 0, seeds: Sequence[Recipe] | None = None
    ) -> None:
        self.problem, self.goal, self.more = problem, goal, more
        self.seeds = SEEDS if seeds is None else seeds
        self.kitchen = Kitchen(problem.shop, 16 if problem.ranks <= 16 else 4)
        self.random = Random(_SEED)
        self.best: list[Recipe] = []
        self.turn = 0

    def under(self, limits: tuple[float, ...], effort: float) -> list[Cooked]:
        """What is found under these limits, the best first.  ``effort``: ops to schedule for it."""
        random, problem = self.random, self.problem.like(limits=limits)
        ops = _ops(problem)
        count = max(1, int(min(effort / ops, _RECIPES * ops)))
        first = [*self.best[:_CARRIED], *self._seeds(max(1, count // 2))][:count]
        first += [random_recipe(random) for _ in range(max(1, int(_NEW * count)) - len(first))]
        found: list[Cooked] = []
        for recipe in first:
            found.append(self.cooked(recipe, problem))
            if len(found) > 2 * _POPULATION:
                found = sorted(found, key=_worth)[:_POPULATION]
        for _ in range(count - len(first)):
            at = random.randrange(len(found))
            one, mate = found[at].recipe, random.choice(found).recipe
            child = cross(one, mate, random) if random.random() < 0.2 else mutate(one, random)
            cooked = self.cooked(child, problem)
            if cooked.value <= found[at].value:
                found[at] = cooked
        found.sort(key=_worth)
        self.best = [cooked.recipe for cooked in found]
        return found

    def cook(self, recipe: Recipe, problem: Problem) -> Coded:
        """The order for a problem that differs from the own one in microbatches and limits at most."""
        shop, m = problem.shop, problem.microbatches
        most, caps = recipe.memory * problem.ranks, []
        for rank, limit in enumerate(problem.limits):
            one = shop.smallest_limit(rank)
            caps.append(max(one, min(limit - recipe.spare * one, most * one)))
        return dispatch(shop, m, self.kitchen.due(recipe, m, problem.limits), caps, recipe.patience)

    def cooked(self, recipe: Recipe, problem: Problem) -> Cooked:
        coded = self.cook(recipe, problem)
        if not fits(problem.shop, coded, problem.microbatches, problem.limits):
            return Cooked(inf, recipe, coded)
        done = ran(problem, coded)
        return Cooked(self.goal.value(done) + self.more * self._period(done), recipe, coded)

    def _period(self, done: Run) -> float:
        """Seconds from one microbatch to the next, in the middle."""
        m = self.problem.microbatches
        begin, end = m // 3, 2 * m // 3
        if end <= begin:
            return self.problem.shop.period
        ends = done.end.reshape(-1, m)
        return max(self.problem.shop.period, float((ends[:, end] - ends[:, begin]).mean()) / (end - begin))

    def _seeds(self, most: int) -> list[Recipe]:
        """The next so many."""
        count = min(most, len(self.seeds))
        at, self.turn = self.turn, self.turn + count
        return [self.seeds[(at + k) % len(self.seeds)] for k in range(count)]


def ran(problem: Problem, coded: Coded) -> Run:
    """An order that was made by running it cannot block."""
    done = run(problem.shop, coded, problem.microbatches)
    assert done is not None, "an order that came from a run blocks"
    return done


def _worth(cooked: Cooked) -> float:
    return cooked.value
