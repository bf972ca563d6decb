"""Schedules made for the costs at hand, under memory limits.

A repeated block gives due dates, list scheduling makes an order of them, and the recipes for how the block
is entered and left evolve: the best are varied and mixed.  The winners' orders are then improved in place.
A long step also takes the best order of a short one, stretched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random

from fxpipe.schedule.dispatch import dispatch
from fxpipe.schedule.goal import Goal, Objective
from fxpipe.schedule.improve import improve
from fxpipe.schedule.ops import Order
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.recipe import Kitchen, Recipe, cross, mutate, random_recipe
from fxpipe.schedule.seeds import SEEDS
from fxpipe.schedule.shop import Coded, decode, encode, fits, run
from fxpipe.schedule.stretch import stretched

EFFORT = 2_600_000
"""Ops that a synthesis may schedule, by default: about five seconds.  A large problem gets fewer."""

_LARGE = 3_100  # ops of a problem beyond which the effort falls
_RECIPES = 2_250  # more are of little use
_POPULATION = 16
_SHORT = 3  # microbatches per rank up to which a step is no long one
_FIRST = 0.7  # of a long step's effort, for a short one
_BEST = 4  # recipes whose orders are improved
_BEAM = 30  # what finding a block costs, in ops per section and unit of width
_IMPROVE = 20  # tries of an improvement for each time that the effort could schedule all ops
_IMPROVE_LONG = 10  # the same for a long step, in the end

Starts = Callable[[Problem], Sequence[Order]]
"""Makes orders for a problem from which a synthesis may start."""


def synthesise(
    problem: Problem,
    starts: Starts = lambda problem: (),
    objective: Objective = "span",
    given: Sequence[Order] = (),
) -> Order:
    """The best order that is found within the limits: of the ``given`` ones, of those that ``starts`` makes
    for a problem, and of new ones.

    All must keep the limits.  The same input gives the same order.
    Raises ScheduleError where a rank's limit is below what one microbatch takes on it.
    """
    m, goal, ops = problem.microbatches, Goal.of(problem, objective), _ops(problem)
    effort = int(min(EFFORT * problem.effort * min(1.0, _LARGE / ops), _RECIPES * ops))
    is_long = m > _SHORT * problem.ranks
    entries = [_entry(problem, goal, encode(order, m)) for order in (*given, *starts(problem))]
    if not any(goal.is_met(value) for value, _ in entries):
        if is_long:
            entries += _lengthen(problem, starts, goal, effort)
        else:
            entries += _evolve(problem, goal, effort)
    entries = sorted((entry for entry in entries if entry[0] < inf), key=lambda entry: entry[0])
    tries = (_IMPROVE_LONG if is_long else _IMPROVE) * effort // ops
    return decode(_improved(problem, goal, [coded for _, coded in entries[:_BEST]], tries), m)


def is_large(problem: Problem) -> bool:
    """Whether the problem has so many ops that a synthesis gets less effort for it."""
    return _ops(problem) > _LARGE


def _ops(problem: Problem) -> int:
    return problem.shop.sections * problem.microbatches


def _improved(problem: Problem, goal: Goal, orders: Sequence[Coded], tries: int) -> Coded:
    """The best that local search makes of the orders.  After each round the better half goes on."""
    rounds = len(orders).bit_length()
    for _ in range(rounds):
        each = tries // (rounds * len(orders))
        orders = [
            improve(problem.shop, coded, problem.microbatches, problem.limits, goal, each) for coded in orders
        ]
        orders = sorted(orders, key=lambda coded: _worth(problem, coded, goal))[: max(1, len(orders) // 2)]
    return orders[0]


def _lengthen(problem: Problem, starts: Starts, goal: Goal, effort: int) -> list[tuple[float, Coded]]:
    """Orders for a long step: recipes that evolve on a short one, and the best order of that one, stretched.
    For a large problem there is only time for the recipe that did best."""
    short = replace(problem, microbatches=_SHORT * problem.ranks)
    goal_of_short, large = Goal.of(short, goal.objective), is_large(problem)
    first = effort if large else int(_FIRST * effort)
    found = Evolution(short, goal_of_short, first).finish(SEEDS)[:_POPULATION]
    recipes = [cooked.recipe for cooked in found[: 1 if large else None]]
    whole = Evolution(problem, goal, effort - first).finish(recipes, new=0.0)
    entries = [(cooked.value, cooked.coded) for cooked in whole[:_BEST]]
    if not large:
        orders = [cooked.coded for cooked in found[:_BEST]]
        orders += [encode(order, short.microbatches) for order in starts(short)]
        order = _improved(short, goal_of_short, orders, _IMPROVE * effort // (2 * _ops(short)))
        longer = stretched(order, short.microbatches, problem)
        entries += [_entry(problem, goal, coded) for coded in longer]
    return entries


def _evolve(problem: Problem, goal: Goal, effort: int) -> list[tuple[float, Coded]]:
    """The best orders of an evolution of recipes."""
    return [(cooked.value, cooked.coded) for cooked in Evolution(problem, goal, effort).finish(SEEDS)[:_BEST]]


def _entry(problem: Problem, goal: Goal, coded: Coded) -> tuple[float, Coded]:
    return _worth(problem, coded, goal), coded


def _worth(problem: Problem, coded: Coded, goal: Goal) -> float:
    done = run(problem.shop, coded, problem.microbatches)
    assert done is not None, "an order that was made by running it cannot block"
    return goal.value(done)


@dataclass(frozen=True, eq=False)
class Cooked:
    """A recipe, the order that follows from it, and what that is worth: infinite where it breaks a limit."""

    value: float
    recipe: Recipe
    coded: Coded


class Evolution:
    """Recipes for a problem.  ``effort``: ops that it may schedule."""

    def __init__(self, problem: Problem, goal: Goal, effort: int) -> None:
        self.shop, self.limits, self.microbatches = problem.shop, problem.limits, problem.microbatches
        self.memory = [self.shop.smallest_limit(rank) for rank in range(self.shop.ranks)]
        self.goal = goal
        self.left = self.effort = effort
        self.random = Random(0)
        self.kitchen = Kitchen(self.shop, 16 if problem.ranks <= 16 else 4)
        self.population: list[Cooked] = []

    def finish(self, seeds: Sequence[Recipe], new: float = 0.3) -> list[Cooked]:
        """The best, best first.  ``new``: the share of the effort that new ones get."""
        random = self.random
        for recipe in seeds:
            if self.left > 0 or not self.population:
                self._add(self.cook(recipe))
        while self.left > (1 - new) * self.effort:
            self._add(self.cook(random_recipe(random)))
        while self.left > 0:
            at = random.randrange(len(self.population))
            one = self.population[at].recipe
            mate = random.choice(self.population).recipe
            cooked = self.cook(cross(one, mate, random) if random.random() < 0.2 else mutate(one, random))
            if cooked.value <= self.population[at].value:
                self.population[at] = cooked
        return sorted(self.population, key=lambda cooked: cooked.value)

    def _add(self, cooked: Cooked) -> None:
        self.population.append(cooked)
        if len(self.population) > 2 * _POPULATION:
            self.population.sort(key=lambda cooked: cooked.value)
            del self.population[_POPULATION:]

    def cook(self, recipe: Recipe) -> Cooked:
        known, m = len(self.kitchen.blocks), self.microbatches
        due = self.kitchen.due(recipe, m)
        caps = [max(1.0, recipe.memory * self.shop.ranks) * memory for memory in self.memory]
        coded = dispatch(self.shop, m, due, list(map(min, self.limits, caps)), recipe.patience)
        self.left -= self.shop.sections * m
        if len(self.kitchen.blocks) > known:
            self.left -= _BEAM * self.kitchen.width * self.shop.sections
        done = run(self.shop, coded, m)
        assert done is not None, "an order that was made by running it cannot block"
        value = self.goal.value(done) if fits(self.shop, coded, m, self.limits) else inf
        if self.goal.is_met(value):
            self.left = 0
        return Cooked(value, recipe, coded)
