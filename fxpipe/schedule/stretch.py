"""A long step's order from a short one's: what the short one's middle does is repeated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from fxpipe.schedule.dispatch import dispatch
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.shop import Coded, run

_GROUPS = (2, 1, 4, 3, 5)  # microbatches that are repeated together
_NEAR = (0, -1, 1, -2, 2, -3, 3, -4, 4)  # microbatches from the middle where they begin
_PATIENCES = ((1.001, 0.5, 0.5), (1.001, 1.001, 1.001), (1.001, 0.3, 0.5))
_WAYS = [*product(enumerate(_GROUPS), enumerate(_NEAR), enumerate(_PATIENCES))]
_WAYS.sort(key=lambda way: sum(place for place, _ in way))


def stretched(coded: Coded, microbatches: int, problem: Problem) -> Iterator[Coded]:
    """Orders for the problem's step from one for so many microbatches, fewer than it has and at least four.

    The first microbatches keep their times and the last ones theirs before the end; those between follow
    each other as a few in the middle.  From these due dates comes an order within the limits.  What is likely
    to be good comes first.
    """
    shop, m, more = problem.shop, problem.microbatches, problem.microbatches - microbatches
    done = run(shop, coded, microbatches)
    assert done is not None, "the order to stretch cannot progress"
    start = done.end.reshape(-1, microbatches) - np.array(shop.seconds)[:, None]
    for (_, group), (_, near), (_, patience) in _WAYS:
        at = max(1, min(microbatches - 2, microbatches // 2 + near))
        last = min(at + group, microbatches - 1)
        period = (start[:, last] - start[:, at]).mean() / (last - at)
        turn, place = np.divmod(np.arange(more), group)
        between = start[:, np.minimum(at + place, microbatches - 1)] + turn * group * period
        due = np.hstack((start[:, :at], between, start[:, at:] + more * period)).ravel()
        yield dispatch(shop, m, due, problem.limits, patience)
