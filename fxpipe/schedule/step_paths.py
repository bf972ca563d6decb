"""A step of one microbatch as the lower bounds read it."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.schedule.bound import distances, in_order, work_and_waits
from fxpipe.schedule.costs import Costs, StageCost
from fxpipe.schedule.dependencies import SECTIONS_PER_STAGE, Needs


@dataclass(frozen=True)
class StepPaths:
    """A step as the rules read it: each section's rank, seconds, needs, and longest path to its start and
    from its end; each stage's costs, with the bytes alone that stay on the rank."""

    rank: tuple[int, ...]
    seconds: list[float]
    waits: list[Needs]
    order: tuple[int, ...]
    head: list[float]
    tail: list[float]
    stages: tuple[StageCost, ...]
    costs: Costs

    @staticmethod
    def of(costs: Costs, placement: tuple[int, ...]) -> StepPaths:
        seconds, waits = work_and_waits(costs, placement)
        head, tail = distances(waits, seconds)
        ranks = tuple(placement[section // SECTIONS_PER_STAGE] for section in range(len(seconds)))
        return StepPaths(ranks, seconds, waits, in_order(waits), head, tail, _staying(costs), costs)


def _staying(costs: Costs) -> tuple[StageCost, ...]:
    """The stages with the bytes that no schedule can offload."""
    if costs.link is None:
        return costs.stages
    return tuple(
        StageCost(
            cost.forward,
            cost.backward,
            cost.weight,
            max(0.0, cost.saved_activations - cost.offloadable - cost.offloadable_for_weight),
            max(0.0, cost.saved_for_weight - cost.offloadable_for_weight),
        )
        for cost in costs.stages
    )
