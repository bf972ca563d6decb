"""Orders that were made, and the best of them improved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np

from fxpipe.schedule.goal import Goal, Objective
from fxpipe.schedule.improve import improve
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.shop import Coded, Run, fits, run

IMPROVED = 4  # orders, beside the best of before


@dataclass(frozen=True, eq=False)
class Made:
    """An order.  What counts is the objective, and of equals the value that is searched with."""

    coded: Coded
    objective: float = inf
    value: float = inf


def ran(problem: Problem, coded: Coded) -> Run:
    """An order that was made by running it cannot block."""
    done = run(problem.shop, coded, problem.microbatches)
    assert done is not None, "an order that came from a run blocks"
    return done


def judged(goal: Goal, coded: Coded, done: Run) -> Made:
    return Made(coded, float(f"{goal.time(done):.12g}"), goal.value(done))


class Best:
    """The best order of a problem under limits that rise, and the best of all that keep the problem's own."""

    def __init__(self, problem: Problem, objective: Objective) -> None:
        self.problem, self.goal = problem, Goal.of(problem, objective)
        self.top = self.kept = Made(np.zeros(0, np.int64))

    @property
    def is_met(self) -> bool:
        """Is the best as good as can be?"""
        return self.top.objective <= self.goal.bound * (1 + 1e-9)

    def made(self, orders: Iterable[Coded]) -> list[Made]:
        return [judged(self.goal, coded, ran(self.problem, coded)) for coded in orders]

    def add(self, limits: tuple[float, ...], orders: Iterable[Made], tries: int) -> None:
        """Local search from the one that is here and from the best of those that keep the limits, which no
        order here breaks.  After each round the better half goes on."""
        shop, m, before = self.problem.shop, self.problem.microbatches, self.top
        fitting = [order for order in orders if fits(shop, order.coded, m, limits)]
        self._keep(fitting)
        found = _distinct(sorted(fitting, key=_value)[:IMPROVED])
        if before.value < inf:
            found = _distinct([before, *found])
        if not (found and tries):
            return
        rounds = len(found).bit_length()
        with ThreadPoolExecutor(len(found)) as pool:
            for _ in range(rounds):
                each = tries // (rounds * len(found))
                better = partial(improve, shop, microbatches=m, limits=limits, goal=self.goal, tries=each)
                found = _distinct(self.made(pool.map(better, [order.coded for order in found])))
                self._keep(found)
                found = found[: max(1, len(found) // 2)]

    def _keep(self, found: Sequence[Made]) -> None:
        shop, m, limits = self.problem.shop, self.problem.microbatches, self.problem.limits
        self.top = min((self.top, *found), key=_key)
        kept = (order for order in found if fits(shop, order.coded, m, limits))
        self.kept = min((self.kept, *kept), key=_key)


def _value(order: Made) -> float:
    return order.value


def _key(order: Made) -> tuple[float, float]:
    return order.objective, order.value


def _distinct(orders: Iterable[Made]) -> list[Made]:
    """Those of different value, the best first."""
    found: list[Made] = []
    for order in sorted(orders, key=_value):
        if not found or order.value > found[-1].value * (1 + 1e-9):
            found.append(order)
    return found
