"""Inserts W ops into orders of F and B.

An *fb_order* is per rank the order of F and B without W.  No F or B depends on a W, so a W can be inserted
anywhere after its B: into a bubble, or before an F that needs its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum

import numpy as np

from fxpipe.schedule.engine.arrays import OpIds, ScheduleArrays
from fxpipe.schedule.families.fill_kernel import fill_ops
from fxpipe.schedule.ops import Op, OpKind, Order


class Gap(StrEnum):
    """Which bubbles of the fb_order a W may go into."""

    ANY = "any"  # any, even if it delays the next op
    WHOLE = "whole"  # only bubbles at least as long as the W
    BALANCED = "balanced"  # shorter ones too, if this rank's idle time would otherwise become the largest


def delay_weights(fb_order: Order, behind: Callable[[int], int]) -> Order:
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


def fill_bubbles(
    fb_order: OpIds, lengths: Sequence[int], microbatches: int, arrays: ScheduleArrays, chunks: int, gap: Gap
) -> OpIds:
    """Insert W ops into the bubbles of an fb_order, given as op ids (the heuristic of 2401.10241).

    ``lengths``: the number of ops of each rank in the fb_order.  A rank holds at most ``chunks`` between F
    and W: then a W runs before the next F.
    """
    table, starts = arrays.tables(microbatches), np.cumsum([0, *lengths])
    order: OpIds
    order, whole = fill_ops(table, microbatches, fb_order, starts, chunks, list(Gap).index(gap))
    assert whole, "an order of F and B within the chunks can progress"
    return order
