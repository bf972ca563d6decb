"""Interleaved for offload: microbatches go through the chunks one behind the other, not in groups.

A chunk in the first half of the model is held long and a late one shortly, so with the first half away a
quarter of the memory is left (2503.01328).  Where microbatches go in groups, the late chunks of a whole group
are held at once, and it is half.  Here microbatch j enters j·v slots of time after the first, and the late
chunks take turns in the room that they need on the average; the early ones run ahead as they may.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from fxpipe.schedule.arrays import decode, shop
from fxpipe.schedule.dispatch import dispatch
from fxpipe.schedule.ops import Order
from fxpipe.schedule.problem import Problem

SHARE = 0.9
"""Of the room that the late chunks need on the average, how much they get: less costs time."""


def staggered(problem: Problem) -> Order:
    p, v, m = problem.ranks, problem.stages_per_rank, problem.microbatches
    late = range(p * (v // 2), p * v)
    light = tuple(
        cost if stage in late else replace(cost, saved=0.0, kept=0.0)
        for stage, cost in enumerate(problem.costs.stages)
    )
    flat = shop(replace(problem.costs, stages=light), problem.placement)
    hop = next(d for d in range(p, p + v + 1) if gcd(d, v) == 1)  # slots between a rank's chunks: no clash
    room = [0.0] * p
    for stage in late:
        # A chunk is held so many slots, and one microbatch comes every v of them.
        turns = (2 * (v - 1 - stage // p) * hop + 2 * (p - 1 - stage % p) + 1) / v
        room[stage % p] += turns * flat.hold[stage]
    limits = [max(SHARE * mean, flat.smallest_limit(rank)) for rank, mean in enumerate(room)]
    return decode(flat, dispatch(flat, m, list(_due(p, v, m, hop)), limits, (0.0, 0.0, 0.0)), m)


def _due(p: int, v: int, m: int, hop: int) -> Iterator[float]:
    """Slots, per op as ``shop`` counts them: down the chunks, and back up from the last."""
    last = 2 * (v - 1) * hop + 2 * (p - 1)
    for stage in range(p * v):
        down = stage // p * hop + stage % p
        for first in (down, last - down + 0.5, last - down + 0.6):  # F, B, W
            yield from (first + microbatch * v for microbatch in range(m))
