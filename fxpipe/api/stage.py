"""A stage of a pipeline, as a user sees it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fxpipe.cost.plan_costs import expressions, known_work
from fxpipe.errors import number_of
from fxpipe.ir.graph import Section
from fxpipe.plan.work import Expressions, PlanWork
from fxpipe.schedule.costs import StageCost
from fxpipe.viz.summary import costs_text


@dataclass(frozen=True, eq=False, repr=False)
class Stage:
    """One stage: the names of its parameters, the costs with which the schedule was made, and its sections
    (none if the pipeline was loaded, or compiled by another rank)."""

    index: int
    rank: int
    parameters: tuple[str, ...]
    costs: StageCost
    sections: tuple[Section, ...]
    work: PlanWork | None

    @cached_property
    def expressions(self) -> Expressions:
        """The costs as sympy expressions of the named lengths.

        Raises SizeError where the pipeline was compiled without ``dimensions``.
        """
        return expressions(known_work(self.work), self.index)

    def __repr__(self) -> str:
        parameters = number_of(len(self.parameters), "parameter")
        return f"Stage({self.index}, rank {self.rank}: {parameters}; {costs_text(self.costs)})"
