"""Inserts W ops into orders of F and B.

An *fb_order* is per rank the order of F and B without W.  No F or B depends on a W, so a W can be inserted
anywhere after its B: into a bubble, or before an F that needs its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum

import numpy as np

from fxpipe.errors import DeadlockError, ScheduleError
from fxpipe.schedule.arrays import OpIds, ScheduleArrays
from fxpipe.schedule.dependencies import op_of_value
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
    fb_order: OpIds,
    lengths: Sequence[int],
    microbatches: int,
    arrays: ScheduleArrays,
    limits: Sequence[float],
    gap: Gap,
    counted: bool = False,
) -> OpIds:
    """Insert W ops into the bubbles of an fb_order, given as op ids (the heuristic of 2401.10241).

    ``lengths``: the number of ops of each rank in the fb_order.  ``limits`` are per rank, in the unit of the
    costs, or, if ``counted``, in chunks between F and W: a W runs at once if the next F would exceed them.
    Raises ScheduleError if no W is left that could free memory, DeadlockError if the fb_order itself cannot
    progress.
    """
    m, table, bounds = microbatches, arrays.tables(microbatches), np.array(limits, np.float64)
    hold, kept = (np.ones(arrays.stages),) * 2 if counted else (table.hold, table.kept)
    starts = np.cumsum([0, *lengths])
    order: OpIds
    order, reached, full = fill_ops(table, m, fb_order, starts, hold, kept, bounds, list(Gap).index(gap))
    left = {
        rank: op_of_value(int(fb_order[at]), m)
        for rank, (at, stop) in enumerate(zip(reached, starts[1:], strict=True))
        if at < stop
    }
    if full >= 0:
        raise ScheduleError(
            f"rank {full} cannot run {left[full]} within its memory limit of {limits[full]:g}, and no W is "
            "left to run; raise the limit"
        )
    if left:
        waits = ", ".join(f"rank {rank} at {op}" for rank, op in left.items())
        raise DeadlockError(f"the order of F and B cannot progress: {waits}")
    return order
