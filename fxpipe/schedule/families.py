"""The schedules that have names: a registry of functions from a problem to an order.

===========  ==========================================================================================
``gpipe``    all forwards, then all backwards (1811.06965): peak memory m · M_B
``1f1b``     one forward, one backward (2104.04473): at most p · M_B with one stage a rank; with more,
             Megatron's interleaved order, or in V placement ZB-V's with fused backwards
``zb-h1``    the backward split, W delayed or put into gaps (2401.10241): at most p · M_B
===========  ==========================================================================================

M_B is what one microbatch saves on one rank, all its chunks together, where chunks save equally.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fxpipe.errors import ScheduleError
from fxpipe.schedule import spines
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.ops import OpKind, Order, Schedule
from fxpipe.schedule.placement import place
from fxpipe.schedule.simulator import simulate
from fxpipe.schedule.weights import Gap, fill, lag


@dataclass(frozen=True)
class Problem:
    """What a schedule is sought for.  ``costs`` has ``ranks · stages_per_rank`` stages."""

    name: str
    ranks: int
    microbatches: int
    stages_per_rank: int
    shape: str
    costs: Costs

    @property
    def placement(self) -> tuple[int, ...]:
        return place(self.shape, self.ranks, self.stages_per_rank)

    @property
    def is_v(self) -> bool:
        """V placement with more than one stage: with one it is the plain one."""
        return self.shape == "v" and self.stages_per_rank > 1


def gpipe(problem: Problem) -> Order:
    return spines.breadth_first(problem.placement, problem.microbatches, OpKind.BW)


def one_f_one_b(problem: Problem) -> Order:
    if problem.is_v:
        return _v_spine(problem, OpKind.BW)
    p, v = problem.ranks, problem.stages_per_rank

    def in_flight(rank: int) -> int:
        return p - rank if v == 1 else p * (v - 1) + 2 * (p - rank) - 1

    return spines.interleaved(problem.placement, problem.microbatches, OpKind.BW, in_flight)


def zb_h1(problem: Problem) -> Order:
    """Plain placement: rank r has at most p·v - r forwards without B, and W r ops of B behind, so that
    every rank holds p·v chunks.  V placement: W goes into the gaps that these costs leave; each rule
    for gaps is tried and the one with the least span bubble kept, with the shorter makespan of equals.
    """
    p, v = problem.ranks, problem.stages_per_rank
    if not problem.is_v:
        spine = spines.interleaved(
            problem.placement, problem.microbatches, OpKind.B, lambda rank: p * v - rank
        )
        return lag(spine, lambda rank: rank)
    spine = _v_spine(problem, OpKind.B)
    counted = _count_chunks(problem.costs)
    limits = (p * v,) * p
    return _fastest(problem, [fill(spine, problem.placement, counted, limits, gap) for gap in Gap])


def _v_spine(problem: Problem, backward: OpKind) -> Order:
    if problem.stages_per_rank != 2:
        raise ScheduleError(
            f"schedule {problem.name} in V placement has 2 stages per rank, not {problem.stages_per_rank}"
        )
    return spines.zero_bubble_v(problem.ranks, problem.microbatches, backward)


def _count_chunks(costs: Costs) -> Costs:
    """The same times; memory counts the chunks between F and W, as if a B freed nothing."""
    return replace(costs, stages=tuple(replace(stage, saved=1.0, kept=1.0) for stage in costs.stages))


def _fastest(problem: Problem, orders: list[Order]) -> Order:
    def bubble(order: Order) -> tuple[float, float]:
        schedule = Schedule(problem.name, problem.placement, problem.microbatches, order)
        timeline = simulate(schedule, problem.costs)
        return timeline.span_bubble, timeline.seconds

    return min(orders, key=bubble)


FAMILIES: dict[str, Callable[[Problem], Order]] = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1}


def build(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    costs: Costs,
    stages_per_rank: int = 1,
    placement: str = "plain",
) -> Schedule:
    """The schedule of a named family, for any numbers of ranks and microbatches from 1.

    ``placement`` is ``"plain"`` (stage s on rank s mod p) or ``"v"`` (0 … p-1, then back).  On every
    stage the ops of a kind run in the order of the microbatches.  Raises ScheduleError for an unknown
    name (it lists the known ones), numbers below 1, or a number of stages that the family has not.
    """
    if name not in FAMILIES:
        raise ScheduleError(f"unknown schedule {name!r}; known: {', '.join(FAMILIES)}")
    numbers = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    for what, number in numbers.items():
        if number < 1:
            raise ScheduleError(f"schedule {name}: {what} is {number}; it must be at least 1")
    if len(costs.stages) != ranks * stages_per_rank:
        raise ScheduleError(
            f"schedule {name}: {ranks} ranks of {stages_per_rank} stages each need the costs of "
            f"{ranks * stages_per_rank} stages, not {len(costs.stages)}"
        )
    problem = Problem(name, ranks, microbatches, stages_per_rank, placement, costs)
    return Schedule(name, problem.placement, microbatches, FAMILIES[name](problem))
