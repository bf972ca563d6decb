"""A long step's order from a short one's: what the short one's middle does is repeated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from fxpipe.schedule.dispatch import dispatch
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.shop import Coded, run

_GROUPS = (1, 2, 4)  # microbatches that are repeated together
_PATIENCES = ((1.001, 0.5, 0.5), (1.001, 1.001, 1.001))


def stretched(coded: Coded, microbatches: int, problem: Problem) -> Iterator[Coded]:
    """Orders for the problem's step from one for so many microbatches, fewer than it has and at least four.

    The first microbatches keep their times and the last ones theirs before the end; those between follow
    each other as in the middle.  From these due dates comes an order within the limits.
    """
    shop, m, more = problem.shop, problem.microbatches, problem.microbatches - microbatches
    done = run(shop, coded, microbatches)
    assert done is not None, "the order to stretch cannot progress"
    start = done.end.reshape(-1, microbatches) - np.array(shop.seconds)[:, None]
    middle = microbatches // 2
    near = [c for c in (middle, middle - 2, middle + 2) if 2 <= c <= microbatches - 2]
    for group, at in product(_GROUPS, near):
        last = min(at + 2, microbatches - 1)
        period = (start[:, last] - start[:, at - 2]).mean() / (last - at + 2)
        turn, place = np.divmod(np.arange(more), group)
        between = start[:, np.minimum(at + place, microbatches - 1)] + turn * group * period
        due = np.hstack((start[:, :at], between, start[:, at:] + more * period)).ravel()
        for patience in _PATIENCES:
            yield dispatch(shop, m, due, problem.limits, patience)
