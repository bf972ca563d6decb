"""The published orders of a problem: where the search starts."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import numpy as np

from fxpipe.schedule.engine.arrays import OpIds, encode
from fxpipe.schedule.engine.dispatch import dispatch
from fxpipe.schedule.engine.kernel import Floats
from fxpipe.schedule.families import fb_orders
from fxpipe.schedule.families.greedy import zero_bubble, zero_bubble_v
from fxpipe.schedule.families.weights import Gap, delay_weights, fill_bubbles
from fxpipe.schedule.ops import OpKind, Order
from fxpipe.schedule.problem import Problem


def starts(problem: Problem) -> list[OpIds]:
    """The orders that are published for its stages a rank and its placement, whatever memory they need."""
    if problem.is_v:
        return [*two_in_v(problem)] if problem.stages_per_rank == 2 else []
    return [*one_a_rank(problem)] if problem.stages_per_rank == 1 else [*interleaved(problem)]


def one_a_rank(problem: Problem) -> Iterator[OpIds]:
    """1F1B, ZB-H1, ZB-H2, and ZB under the limits."""
    p, m, placement = problem.ranks, problem.microbatches, problem.placement
    for warm, behind in ((1, 0), (1, 1), (2, 2)):
        order = fb_orders.interleaved(placement, m, OpKind.B, lambda rank, w=warm: w * (p - rank) - w + 1)  # type: ignore[misc]
        yield encode(delay_weights(order, lambda rank, b=behind: b * rank), m)  # type: ignore[misc]
    yield from zero_bubble(problem.arrays, m, problem.limits)


def interleaved(problem: Problem) -> Iterator[OpIds]:
    """Interleaved 1F1B, and GIS in groups of p to p/2."""
    p, m, v = problem.ranks, problem.microbatches, problem.stages_per_rank
    order = fb_orders.interleaved(
        problem.placement, m, OpKind.B, lambda rank: p * (v - 1) + 2 * (p - rank) - 1
    )
    yield encode(delay_weights(order, lambda rank: 0), m)
    for group in groups(p):
        yield from gis(group, problem)


def groups(ranks: int) -> list[int]:
    """Sizes from p to p/2, not all of them for many ranks."""
    least = ceil(ranks / 2)
    return [*range(ranks, least, -max(1, ranks // 8)), least]


def gis(group: int, problem: Problem) -> list[OpIds]:
    """W after as many B as the rank is far from the first, and in the gaps by all rules."""
    most = group * (problem.stages_per_rank - 1) + problem.ranks
    order = fb_orders.interleaved(
        problem.placement, problem.microbatches, OpKind.B, lambda rank: most - rank, group
    )
    return [
        encode(delay_weights(order, lambda rank: rank), problem.microbatches),
        *filled(order, most, problem),
    ]


def two_in_v(problem: Problem) -> Iterator[OpIds]:
    """ZB-V, and the repeated blocks of V-Min and V-Half (2405.15362)."""
    yield from zero_bubble_v(problem.arrays, problem.microbatches, problem.limits)
    yield from zb_v(problem)
    for block in (v_min, v_half):
        if problem.is_limited:
            yield dispatch(
                problem.arrays, problem.microbatches, _repeated(problem, block(problem.ranks)), problem.limits
            )


def zb_v(problem: Problem) -> list[OpIds]:
    """ZB-V's order of F and B, and W in the gaps by all rules."""
    order = fb_orders.zero_bubble_v(problem.ranks, problem.microbatches, OpKind.B)
    return filled(order, 2 * problem.ranks, problem)


def v_min(ranks: int) -> list[tuple[int, int, int, int]]:
    """Per rank the slots of F and B of its two stages, F0, F1, B1, B0."""
    p, shift = ranks, 2 if ranks % 3 == 0 else 0
    return [(i, 2 * p - i - 1, 2 * p + shift + i, 4 * p + shift - i - 1) for i in range(p)]


def v_half(ranks: int) -> list[tuple[int, int, int, int]]:
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


def filled(order: Order, chunks: int, problem: Problem) -> list[OpIds]:
    """W in the gaps by each rule, with so many chunks between F and W on a rank at most."""
    op_ids, lengths, m = encode(order, problem.microbatches), [*map(len, order)], problem.microbatches
    return [fill_bubbles(op_ids, lengths, m, problem.arrays, chunks, gap) for gap in Gap]
