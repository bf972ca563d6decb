"""The records of a search: an order that keeps the limits of its problem, and a complete schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fxpipe.schedule.candidate_row import Tried
from fxpipe.schedule.engine.order import Order
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.simulation.steps import simulate_steps
from fxpipe.schedule.simulation.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Candidate:
    """An order for a problem, made for the family called ``family``.

    ``seconds``: its objective; for an order of the model's own stages that is to be extended, an estimate
    from below.  ``peak``: the memory of the rank that needs the most.
    """

    problem: Problem
    family: str
    order: Order
    seconds: float
    peak: float

    @property
    def key(self) -> tuple[float, float]:
        """The least is the best."""
        return self.seconds, self.peak

    @property
    def is_optimal(self) -> bool:
        return self.seconds <= self.problem.bound * (1 + 1e-9)


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The fastest schedule and its problem; all candidates (of a named schedule none are kept)."""

    problem: Problem
    timeline: Timeline
    tried: tuple[Tried, ...] = ()

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @cached_property
    def period(self) -> float | None:
        """The seconds a step of many with post-validation, where that is the objective."""
        if self.problem.objective != "period":
            return None
        return simulate_steps(self.schedule, self.timeline.costs, "post").period

    @property
    def seconds(self) -> float:
        """The seconds of a step by itself, or of one of many where the period is the objective."""
        return self.timeline.seconds if self.period is None else self.period

    @cached_property
    def key(self) -> tuple[float, float, float, float]:
        """The least is the best: the objective first."""
        timeline = self.timeline
        seconds, span, peak = (
            float(f"{x:.9g}") for x in (self.seconds, timeline.span, max(timeline.peak_memory))
        )
        moved = timeline.moved
        by_span = self.problem.objective == "span"
        return (span, seconds, moved, peak) if by_span else (seconds, moved, peak, span)
