"""The memory limits that a search climbs on its way to the one that is asked for.

A rung is an amount of memory.  Which ones there are does not depend on the limits that are asked for, but
for how far up they go: to the first that is not below them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor, inf, log2

from fxpipe.schedule.problem import Problem

_FINE, _BEYOND = 1 / 32, 1 / 8  # steps up to ranks · M_B and beyond, in that
_LOW = 1 / 4  # of the memory: no step is longer
_LEAST = 1 / 4  # M_B, of any step


@dataclass(frozen=True)
class Rung:
    """``memory`` is the limit of the rank that has the least room for a microbatch; ``share`` is that of a
    rung's usual effort which is due to it, since it lies only so far above the one below."""

    memory: float
    share: float = 1.0


def rungs(problems: Sequence[Problem]) -> tuple[Rung, ...]:
    """Rising, up to the largest limit of problems with the same ranks and microbatches.

    The first is one microbatch of the problem that takes the least; one of each other is a rung as well.
    What is above twice the ranks, or all the microbatches, is infinite.
    """
    tightest = [_tightest(problem) for problem in problems]
    ranks, m = problems[0].ranks, problems[0].microbatches
    asked, least = max(limit for limit, _ in tightest), min(needed for _, needed in tightest)
    every = {needed for _, needed in tightest}
    every |= {units * least for units in _units(ranks, min(m, 2 * ranks))} | {inf}
    found, usual, below = list[Rung](), max(_LEAST, _FINE * ranks) * least, 0.0
    for memory in sorted({float(f"{memory:.12g}") for memory in every}):
        found.append(Rung(memory, min(1.0, (memory - below) / usual) if usual else 1.0))
        if memory >= asked * (1 - 1e-9):
            break
        below = memory
    return tuple(found)


def at_rung(problem: Problem, rung: Rung) -> tuple[float, ...]:
    """The problem's limits, scaled."""
    limit = room(problem)
    if inf in (rung.memory, limit) or limit == 0:
        return (rung.memory,) * problem.ranks
    return tuple(rung.memory * float(f"{other / limit:.12g}") for other in problem.limits)


def room(problem: Problem) -> float:
    """The limit of the rank that has the least room for a microbatch."""
    return _tightest(problem)[0]


def _tightest(problem: Problem) -> tuple[float, float]:
    """A limit, and what one microbatch takes, on the rank where the latter goes into the former the least."""
    needed = [problem.shop.smallest_limit(rank) for rank in range(problem.ranks)]
    pairs = zip(problem.limits, needed, strict=True)
    return min(pairs, key=lambda pair: (pair[0] / pair[1] if pair[1] else inf, -pair[1]))


def _units(ranks: int, most: int) -> Iterator[float]:
    units = 1.0
    while units <= most:
        yield units
        share = _FINE if units < ranks else _BEYOND
        step = max(_LEAST, min(share * ranks, 2.0 ** floor(log2(_LOW * units))))
        units = (units // step + 1) * step
