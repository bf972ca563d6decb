"""The objective of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.engine.arrays import Run, ScheduleArrays
from fxpipe.schedule.engine.kernel import SHARE, score
from fxpipe.schedule.problem import Problem

Objective = Literal["makespan", "span"]
"""The span is the longest of the ranks' times from their first op's start to their last op's end."""


@dataclass(frozen=True)
class Goal:
    """An objective, and a lower bound on it."""

    objective: Objective
    bound: float

    @classmethod
    def of(
        cls,
        objective: Objective,
        costs: Costs,
        placement: tuple[int, ...],
        microbatches: int,
        arrays: ScheduleArrays,
    ) -> Goal:
        work = microbatches * arrays.period
        if objective == "makespan":
            work = max(work, lower_bound(costs, placement, microbatches))
        return cls(objective, work)

    @classmethod
    def for_problem(cls, problem: Problem, objective: Objective) -> Goal:
        return cls.of(objective, problem.costs, problem.placement, problem.microbatches, problem.arrays)

    @property
    def by_makespan(self) -> bool:
        return self.objective == "makespan"

    @property
    def good_enough(self) -> float:
        """Stop when the value is at most this."""
        return self.bound * (1 + SHARE) * (1 + 1e-9)

    def time(self, done: Run) -> float:
        return done.makespan if self.by_makespan else done.span

    def value(self, done: Run) -> float:
        """The value to minimize: at most 0.1% above the objective."""
        return float(score(done.first, done.free, self.by_makespan))
