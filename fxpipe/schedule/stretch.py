"""A long step's order from a short one's: what the short one's middle does is repeated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

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
    seconds, _ = shop.of_ops(microbatches)
    times = [end - length for end, length in zip(done.end, seconds, strict=True)]
    rows = [times[i : i + microbatches] for i in range(0, len(times), microbatches)]
    middle = microbatches // 2
    near = [c for c in (middle, middle - 2, middle + 2) if 2 <= c <= microbatches - 2]
    for group, at, patience in product(_GROUPS, near, _PATIENCES):
        last = min(at + 2, microbatches - 1)
        period = sum(row[last] - row[at - 2] for row in rows) / (last - at + 2) / len(rows)
        due: list[float] = []
        for row in rows:
            cycle = [row[min(at + i, microbatches - 1)] for i in range(group)]
            due += row[:at]
            due += [cycle[i % group] + (i - i % group) * period for i in range(more)]
            due += [time + more * period for time in row[at:]]
        yield dispatch(shop, m, due, problem.limits, patience)
