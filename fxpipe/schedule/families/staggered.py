"""An interleaved schedule for offload: microbatches run one after the other, not in groups.

Activations of early chunks are live for long, those of late chunks for a short time, so with the first half
of the model offloaded a quarter of the memory remains (2503.01328).  If microbatches ran in groups, the late
chunks of a whole group would be live at once, and half would remain.  Here microbatch j enters j·v time slots
after the first, and chunks share the memory that they need on average: the late ones alone, which holds the
least if the link carries what early chunks give it as they run ahead, or all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from fxpipe.schedule.engine.arrays import schedule_arrays
from fxpipe.schedule.engine.dispatch import dispatch
from fxpipe.schedule.offload.planner import HALF, offload
from fxpipe.schedule.ops import RankOps
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.simulation.simulator import simulate

SHARE = 0.9
"""The share of their average memory that chunks get; less costs time."""


def staggered(problem: Problem) -> RankOps:
    """Take of two orders the one with the smaller product of time and memory with half of it offloaded."""
    stages, early = problem.ranks * problem.stages_per_rank, problem.ranks * (problem.stages_per_rank // 2)
    late_alone = _within_mean(problem, range(early, stages))
    if problem.costs.link is None:
        return late_alone

    def area(ops: RankOps) -> float:
        timeline = offload(simulate(problem.schedule("", ops), problem.costs), HALF).timeline
        return timeline.seconds * max(timeline.peak_memory)

    return min(late_alone, _within_mean(problem, range(stages)), key=area)


def _within_mean(problem: Problem, counted: range) -> RankOps:
    """The order in which the stages that are ``counted`` keep to the memory that they need on average."""
    p, v, m = problem.ranks, problem.stages_per_rank, problem.microbatches
    light = tuple(
        cost if stage in counted else replace(cost, saved_activations=0.0, saved_for_weight=0.0)
        for stage, cost in enumerate(problem.costs.stages)
    )
    arrays = schedule_arrays(replace(problem.costs, stages=light), problem.placement, m)
    hop = next(d for d in range(p, p + v + 1) if gcd(d, v) == 1)  # slots between a rank's chunks: no clash
    memory = [0.0] * p
    for stage in counted:
        # The slots for which a chunk is live, over v slots from one microbatch to the next.
        turns = (2 * (v - 1 - stage // p) * hop + 2 * (p - 1 - stage % p) + 1) / v
        memory[stage % p] += turns * arrays.hold[stage]
    limits = [max(SHARE * mean, least) for mean, least in zip(memory, arrays.smallest_limits, strict=True)]
    return dispatch(arrays, list(_due(p, v, m, hop)), limits, (0.0, 0.0, 0.0)).ops


def _due(p: int, v: int, m: int, hop: int) -> Iterator[float]:
    """Due dates in slots, per op id: down the chunks, and back up from the last."""
    last = 2 * (v - 1) * hop + 2 * (p - 1)
    for stage in range(p * v):
        down = stage // p * hop + stage % p
        for first in (down, last - down + 0.5, last - down + 0.6):  # F, B, W
            yield from (first + microbatch * v for microbatch in range(m))
