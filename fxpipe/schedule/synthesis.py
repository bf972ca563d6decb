"""Schedules made for the costs at hand, under memory limits.

A repeated block gives due dates, list scheduling makes an order of them, and the recipes for how the block
is entered and left evolve: the best are varied and mixed.  The winners' orders are then improved in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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

EFFORT = 2_000_000
"""Ops that a synthesis may schedule, by default: about two seconds.  A large problem gets fewer."""

_LARGE = 4_000  # ops of a problem from which on the effort falls, and a part of it stands for all
_RECIPES = 1_500  # more are not of use
_POPULATION = 16
_SHORT = 3  # that part's microbatches per rank
_FIRST = 0.7  # of the effort, for the part, where the whole is not large
_BEST = 3  # recipes whose orders are improved
_BEAM = 30  # what finding a block costs, in ops per section and unit of width
_IMPROVE = 20  # tries of an improvement that cost as much as scheduling anew


def synthesise(
    problem: Problem,
    starts: Sequence[Order] = (),
    objective: Objective = "span",
) -> Order:
    """The best order that is found within the limits, of the ``starts`` and of new ones.

    ``starts`` must keep the limits.  The same input gives the same order.
    Raises ScheduleError where a rank's limit is below what one microbatch takes on it.
    """
    m, flat, limits = problem.microbatches, problem.shop, problem.limits
    ops = flat.sections * m
    effort = int(min(EFFORT * problem.effort * min(1.0, _LARGE / ops), _RECIPES * ops))
    goal = Goal.of(problem, objective)
    entries = [(_worth(problem, coded, goal), coded) for coded in (encode(order, m) for order in starts)]
    if not any(goal.is_met(value) for value, _ in entries):
        entries += _evolve(problem, goal, effort)
    entries = sorted((entry for entry in entries if entry[0] < inf), key=lambda entry: entry[0])
    tries = _IMPROVE * effort // (2 * ops)
    improved = [improve(flat, coded, m, limits, goal, tries // 2) for _, coded in entries[:2]]
    return decode(min(improved, key=lambda coded: _worth(problem, coded, goal)), m)


def _evolve(problem: Problem, goal: Goal, effort: int) -> list[tuple[float, Coded]]:
    """The best orders of an evolution.  That of a long step begins with a part of it; of a large problem's
    orders there is only the one whose recipe did best on the part."""
    m, kitchen = problem.microbatches, Kitchen(problem.shop, 16 if problem.ranks <= 16 else 4)
    if m <= _SHORT * problem.ranks:
        whole = _Evolution(problem, goal, kitchen, effort)
        return [whole.cook(recipe) for recipe in whole.finish(SEEDS)[:_BEST]]
    short = replace(problem, microbatches=_SHORT * problem.ranks)
    is_large = problem.shop.sections * m > _LARGE
    first = effort if is_large else int(_FIRST * effort)
    part = _Evolution(short, Goal.of(short, goal.objective), kitchen, first)
    found = part.finish(SEEDS)
    whole = _Evolution(problem, goal, kitchen, effort - first)
    best = found[:1] if is_large else whole.finish(found, new=0.0)[:_BEST]
    return [whole.cook(recipe) for recipe in best]


def _worth(problem: Problem, coded: Coded, goal: Goal) -> float:
    done = run(problem.shop, coded, problem.microbatches)
    assert done is not None, "an order that was made by running it cannot block"
    return goal.value(done)


class _Evolution:
    def __init__(self, problem: Problem, goal: Goal, kitchen: Kitchen, effort: int) -> None:
        self.shop, self.limits, self.microbatches = problem.shop, problem.limits, problem.microbatches
        self.memory = [self.shop.smallest_limit(rank) for rank in range(self.shop.ranks)]
        self.goal = goal
        self.left = self.effort = effort
        self.random = Random(0)
        self.kitchen = kitchen
        self.population: list[tuple[float, Recipe]] = []

    def finish(self, seeds: Sequence[Recipe], new: float = 0.3) -> list[Recipe]:
        """The best recipes, best first.  ``new``: the share of the effort that new ones get."""
        random = self.random
        for recipe in seeds:
            if self.left > 0 or not self.population:
                self._try(recipe)
        while self.left > (1 - new) * self.effort:
            self._try(random_recipe(random))
        while self.left > 0:
            at = random.randrange(len(self.population))
            one = self.population[at][1]
            mate = random.choice(self.population)[1]
            self._try(cross(one, mate, random) if random.random() < 0.2 else mutate(one, random), at)
        ranked = sorted(self.population, key=lambda entry: entry[0])
        return [recipe for _, recipe in ranked]

    def _try(self, recipe: Recipe, against: int | None = None) -> None:
        """Adds a recipe, or lets it take the place of one that it beats."""
        value, _ = self.cook(recipe)
        if against is not None:
            if value <= self.population[against][0]:
                self.population[against] = value, recipe
            return
        self.population.append((value, recipe))
        if len(self.population) > 2 * _POPULATION:
            self.population.sort(key=lambda entry: entry[0])
            del self.population[_POPULATION:]

    def cook(self, recipe: Recipe) -> tuple[float, Coded]:
        """What the recipe's order is worth, infinite where it does not keep the limits; and the order."""
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
        return value, coded
