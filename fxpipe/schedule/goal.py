"""What a search makes small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.shop import Run

_SHARE = 1e-3  # of the ranks' mean span in a value, to tell equals apart


Objective = Literal["makespan", "span"]
"""The span is the longest of the ranks' times from their first op's start to their last op's end."""


@dataclass(frozen=True)
class Goal:
    """An objective, and a value that nothing can beat."""

    objective: Objective
    bound: float

    @classmethod
    def of(cls, problem: Problem, objective: Objective) -> Goal:
        work = problem.microbatches * problem.shop.period
        if objective == "makespan":
            work = max(work, lower_bound(problem.costs, problem.placement, problem.microbatches))
        return cls(objective, work)

    def value(self, done: Run) -> float:
        """To be made small; at most 0.1% above the objective."""
        first = done.makespan if self.objective == "makespan" else done.span
        return first + _SHARE * (sum(done.free) - sum(done.first)) / len(done.free)

    def is_met(self, value: float) -> bool:
        """Is the value as good as it can be?"""
        return value <= self.bound * (1 + _SHARE) * (1 + 1e-9)
