"""List scheduling under memory limits: any priorities, any placement, and it always comes to its end.

Time runs forward over all ranks at once.  A rank that is free starts the op with the least *due* among
those that have arrived and fit its memory, unless an op that is due before would then come too late.

Why it ends: an F of a rank's stage is admitted only while one microbatch would still fit in all later stages
of that rank at a time.  Take the latest stage whose next F has arrived and does not fit: all later stages can
run empty, and then it fits, or an earlier F of the same stage gets its B.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxpipe.errors import ScheduleError
from fxpipe.schedule.arrays import Coded, Shop
from fxpipe.schedule.kernel import Floats, dispatch_ops


def dispatch(
    shop: Shop,
    microbatches: int,
    due: Sequence[float] | Floats,
    limits: Sequence[float],
    patience: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> Coded:
    """The order that follows from ``due``, one number per op (see :mod:`fxpipe.schedule.arrays`).

    ``patience``, for F, B and W, is the share of an op that must fit before the arrival of an op that is due
    earlier: with 0 a rank never waits while it could compute, with 1 no op is delayed by one that is due
    later as far as is known; with more, ops wait for what may come a while later.
    Raises ScheduleError where a limit is below what one microbatch takes on the rank.
    """
    check_room(shop, limits)
    due, bounds, shares = (np.asarray(row, np.float64) for row in (due, limits, patience))
    coded = dispatch_ops(shop.tables(microbatches), microbatches, due, bounds, shares)
    if not len(coded):
        raise ScheduleError("no op can run: the edges between the sections form a cycle")
    return coded


def has_room(shop: Shop, limits: Sequence[float]) -> bool:
    """Does one microbatch fit on every rank?"""
    return _without_room(shop, limits) is None


def check_room(shop: Shop, limits: Sequence[float]) -> None:
    """Raises ScheduleError where a limit is below what one microbatch takes on the rank."""
    rank = _without_room(shop, limits)
    if rank is not None:
        raise ScheduleError(
            f"rank {rank} has a memory limit of {limits[rank]:g}, but one microbatch takes "
            f"{shop.smallest_limit(rank):g} on it"
        )


def _without_room(shop: Shop, limits: Sequence[float]) -> int | None:
    small = (r for r, limit in enumerate(limits) if limit * (1 + 1e-9) < shop.smallest_limit(r))
    return next(small, None)
