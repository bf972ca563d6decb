"""The memory limits that a search climbs on its way to the one that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from fxpipe.schedule.problem import Problem

_LOW = 1 / 8  # the steps below a quarter of the ranks, in ranks · M_B
_LEAST = 1 / 4  # M_B, of any step


def rungs(problem: Problem, fine: float, beyond: float) -> Iterator[tuple[float, ...]]:
    """Limits of the ranks, rising, the last those of the problem.

    All others are the same whatever the problem's limit is, if that is one for all ranks.  Steps are in
    ranks · M_B: ``fine`` from a quarter of the ranks to all of them, and ``beyond``.
    """
    ranks, limits = range(problem.ranks), problem.limits
    needed = [problem.shop.smallest_limit(rank) for rank in ranks]
    units = min((limits[rank] / needed[rank] for rank in ranks if needed[rank]), default=0.0)
    for unit in _units(problem.ranks, min(problem.microbatches, 2 * problem.ranks), fine, beyond):
        if unit >= units * (1 - 1e-9):
            break
        scale = unit / units
        yield tuple(limit * scale if units < inf else unit * max(needed) for limit in limits)
    yield limits


def _units(ranks: int, most: int, fine: float, beyond: float) -> Iterator[float]:
    """In M_B of the rank that has the least room for it."""
    unit = 1.0
    while unit <= most:
        yield unit
        share = _LOW if unit < ranks / 4 else fine if unit < ranks else beyond
        step = max(_LEAST, ranks * share)
        unit = (unit // step + 1) * step
