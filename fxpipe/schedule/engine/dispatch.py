"""List scheduling under memory limits, for any priorities and any placement; it always ends.

Time runs forward over all ranks at once.  A free rank starts the op with the earliest due date among those
that have arrived and fit its memory, unless this would delay an op with an earlier due date.

Why it ends: an F is admitted only while one microbatch would still fit in all later stages of the rank.  Take
the latest stage whose next F has arrived and does not fit: all later stages can finish their microbatches,
and then this F fits, or an earlier F of the same stage gets its B.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from fxpipe.errors import ScheduleError
from fxpipe.schedule.engine.arrays import ScheduleArrays
from fxpipe.schedule.engine.dispatch_kernel import dispatch_ops
from fxpipe.schedule.engine.order import Order
from fxpipe.schedule.engine.tables import Floats
from fxpipe.schedule.memory_text import ANY_UNIT, MemoryText
from fxpipe.schedule.simulation.memory import rank_over

#: Some that differ, to take the best of.
LOOKAHEADS = ((0.0, 0.0, 0.0), (0.3, 0.3, 0.3), (1.0, 1.0, 0.5), (1.001, 0.3, 0.7))


def dispatch(
    arrays: ScheduleArrays,
    due: Sequence[float] | Floats,
    limits: Sequence[float],
    lookahead: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> Order:
    """The order that follows from ``due``, one number per op (see :mod:`.order`).

    ``lookahead``, for F, B and W: the share of an op that must fit before the arrival of an op with an
    earlier due date.  With 0 a rank never idles while it could compute; with 1 no op delays an op with an
    earlier due date, as far as arrivals are known; above 1, ranks also wait for ops that arrive later.
    Raises ScheduleError if a limit is below the memory of one microbatch on the rank.
    """
    check_one_microbatch_fits(arrays, limits)
    due, bounds, shares = (np.asarray(row, np.float64) for row in (due, limits, lookahead))
    op_ids = np.empty(arrays.sections * arrays.microbatches, np.int64)
    if dispatch_ops(arrays.tables, arrays.microbatches, due, bounds, shares, op_ids) == inf:
        raise ScheduleError("no op can run: the edges between the sections form a cycle")
    return Order(arrays, op_ids)


def check_one_microbatch_fits(
    arrays: ScheduleArrays, limits: Sequence[float], text: MemoryText = ANY_UNIT
) -> None:
    """Raise ScheduleError if a limit is below the memory of one microbatch on the rank."""
    rank = rank_over(arrays.smallest_limits, limits)
    if rank is not None:
        needed = text.needs(arrays.smallest_limits[rank], rank, limits[rank])
        raise ScheduleError(f"one microbatch needs {needed}")
