"""The published orders of a problem: where the search starts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import ceil

import numpy as np

from fxpipe.schedule.engine.dispatch import dispatch
from fxpipe.schedule.engine.order import Order
from fxpipe.schedule.engine.tables import Floats
from fxpipe.schedule.families import fb_orders
from fxpipe.schedule.families.greedy import zero_bubble, zero_bubble_v
from fxpipe.schedule.families.weights import delay_weights, fill_bubbles
from fxpipe.schedule.ops import OpKind
from fxpipe.schedule.parts import ops_of_parts
from fxpipe.schedule.problem import Problem


def starts(problem: Problem) -> list[Order]:
    """The orders that are published for its stages a rank and its placement, whatever memory they need."""
    if problem.parts:
        return [
            problem.order(ops_of_parts(order.ops, problem.parts, problem.costs))
            for order in starts(problem.joined)
        ]
    if problem.is_v:
        return [*two_in_v(problem)] if problem.stages_per_rank == 2 else []
    return [*one_a_rank(problem)] if problem.stages_per_rank == 1 else [*interleaved(problem)]


def one_a_rank(problem: Problem) -> Iterator[Order]:
    """1F1B, ZB-H1, ZB-H2, and ZB under the limits."""
    p, m, placement = problem.ranks, problem.microbatches, problem.placement
    for warm, behind in ((1, 0), (1, 1), (2, 2)):
        order = fb_orders.interleaved(placement, m, OpKind.B, lambda rank, w=warm: w * (p - rank) - w + 1)  # type: ignore[misc]
        yield problem.order(delay_weights(order, lambda rank, b=behind: b * rank))  # type: ignore[misc]
    yield from zero_bubble(problem.arrays, problem.limits)


def interleaved(problem: Problem) -> Iterator[Order]:
    """Interleaved 1F1B, and GIS in groups of p to p/2."""
    most = partial(most_of_1f1b, problem)
    order = fb_orders.interleaved(problem.placement, problem.microbatches, OpKind.B, most)
    yield problem.order(delay_weights(order, lambda rank: 0))
    for group in groups(problem.ranks):
        yield from gis(group, problem)


def most_of_1f1b(problem: Problem, rank: int) -> int:
    """The most microbatches without their backward that a rank of 1F1B has, over any number of chunks."""
    p, v = problem.ranks, problem.stages_per_rank
    if problem.is_v:
        return p * v
    return p - rank if v == 1 else p * (v - 1) + 2 * (p - rank) - 1


def groups(ranks: int) -> list[int]:
    """Sizes from p to p/2, not all of them for many ranks."""
    least = ceil(ranks / 2)
    return [*range(ranks, least, -max(1, ranks // 8)), least]


def gis(group: int, problem: Problem) -> list[Order]:
    """W after as many B as the rank is far from the first, and in the gaps by all rules."""
    most = group * (problem.stages_per_rank - 1) + problem.ranks
    order = fb_orders.interleaved(
        problem.placement, problem.microbatches, OpKind.B, lambda rank: most - rank, group
    )
    return [
        problem.order(delay_weights(order, lambda rank: rank)),
        *fill_bubbles(order, problem.arrays, most),
    ]


def two_in_v(problem: Problem) -> Iterator[Order]:
    """ZB-V, and the repeated blocks of V-Min and V-Half (2405.15362)."""
    yield from zero_bubble_v(problem.arrays, problem.limits)
    yield from zb_v(problem)
    for block in (v_min, v_half):
        if problem.is_limited:
            yield dispatch(problem.arrays, _repeated(problem, block(problem.ranks)), problem.limits)


def zb_v(problem: Problem) -> list[Order]:
    """ZB-V's order of F and B, and W in the gaps by all rules."""
    order = fb_orders.zero_bubble_v(problem.ranks, problem.microbatches, OpKind.B)
    return fill_bubbles(order, problem.arrays, 2 * problem.ranks)


def v_min(ranks: int) -> list[tuple[int, int, int, int]]:
    """The slots of F and B of each rank's two stages, F0, F1, B1, B0."""
    # Without the shift two of a rank's four would fall into one of the six slots of a block.
    p, shift = ranks, 2 if ranks % 3 == 0 else 0
    return [(i, 2 * p - i - 1, 2 * p + shift + i, 4 * p + shift - i - 1) for i in range(p)]


def v_half(ranks: int) -> list[tuple[int, int, int, int]]:
    # As for V-Min.
    p, shift = ranks, 3 if ranks % 2 == 0 else 0
    return [(2 * i, 3 * p - i - 2, 3 * p + shift + 2 * i - 1, 6 * p + shift - i - 2) for i in range(p)]


def _repeated(problem: Problem, block: list[tuple[int, int, int, int]]) -> Floats:
    """Due dates: a block every six slots; W behind its B."""
    p, arrays = problem.ranks, problem.arrays
    slot = arrays.period / 6
    start = np.empty(arrays.sections)
    for rank, (first, second, back, last) in enumerate(block):
        low, high = 3 * rank, 3 * (2 * p - 1 - rank)
        start[low : low + 3] = first, last, last + 1
        start[high : high + 3] = second, back, back + 1
    pace = 6 * np.arange(problem.microbatches)
    return slot * (start[:, None] + pace).ravel()
