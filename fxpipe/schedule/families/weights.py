"""Inserts W ops into orders of F and B.

An *fb_order* is per rank the order of F and B without W.  No F or B depends on a W, so a W can be inserted
anywhere after its B: into a bubble, or before an F that needs its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum

import numpy as np

from fxpipe.schedule.engine.arrays import ScheduleArrays
from fxpipe.schedule.engine.order import Order, encode
from fxpipe.schedule.families.fill_kernel import fill_ops
from fxpipe.schedule.ops import Op, OpKind, RankOps


class Gap(StrEnum):
    """Which bubbles of the fb_order a W may go into."""

    ANY = "any"  # any, even if it delays the next op
    WHOLE = "whole"  # only bubbles at least as long as the W
    BALANCED = "balanced"  # shorter ones too, if this rank's idle time would otherwise become the largest


def delay_weights(fb_order: RankOps, behind: Callable[[int], int]) -> RankOps:
    """Insert each W ``behind(rank)`` B ops after its own B."""
    return tuple(_delay_weights(ops, behind(rank)) for rank, ops in enumerate(fb_order))


def _delay_weights(ops: Sequence[Op], behind: int) -> tuple[Op, ...]:
    out: list[Op] = []
    pending: deque[Op] = deque()
    for op in ops:
        out.append(op)
        if op.kind is OpKind.B:
            pending.append(Op(OpKind.W, op.stage, op.microbatch))
            if len(pending) > behind:
                out.append(pending.popleft())
    return (*out, *pending)


def fill_bubbles(fb_order: RankOps, arrays: ScheduleArrays, chunks: int) -> list[Order]:
    """Insert W ops into the bubbles of an fb_order (the heuristic of 2401.10241): an order by each rule.

    A rank holds at most ``chunks`` between F and W: then a W runs before the next F.
    """
    m, op_ids = arrays.microbatches, encode(fb_order, arrays.microbatches)
    starts = np.cumsum([0, *map(len, fb_order)])
    orders = []
    for gap in range(len(Gap)):
        order, whole = fill_ops(arrays.tables, m, op_ids, starts, chunks, gap)
        # In such an order a W is never waited for, so nothing can block.
        assert whole, "an order of F and B within the chunks can progress"
        orders.append(Order(arrays, order))
    return orders
