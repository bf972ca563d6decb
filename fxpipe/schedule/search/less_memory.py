"""Looks for an order that is as fast as a given one, and needs less memory.

A search without a limit, or within a wide one, ends at the first order that is fast enough, however many
microbatches that holds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fxpipe.schedule.candidate import Candidate, SearchResult
from fxpipe.schedule.engine.dispatch import LOOKAHEADS, dispatch
from fxpipe.schedule.search.local_search import improve
from fxpipe.schedule.search.pool import ANNEALED, judged
from fxpipe.schedule.simulation.simulator import simulate

_STEPS = 6  # of the bisection
_MOST = 3_000_000  # looks of annealing under a limit
_NEAR = 1.05  # of the time: of 23 lists, of 318 drawn, that annealing made fast enough, 22 were as near


def with_less_memory(fastest: Candidate, seed: int = 0) -> Candidate:
    """The order, or one that is as fast with a lower peak.

    The peak is bisected: list scheduling under each limit, with the start times of the order as due dates,
    and annealing of the best list.
    """
    problem, best, low = fastest.problem, fastest, 0.0
    done = fastest.order.run()
    assert done is not None, "an order that was judged can progress"
    # With its own start times as due dates, list scheduling gives an order like it wherever memory allows.
    start = done.end - np.repeat(np.array(problem.arrays.seconds), problem.microbatches)
    for _ in range(_STEPS):
        limit = (low + best.peak) / 2
        lower = _best_under(fastest, start, limit, seed)
        if lower.seconds <= fastest.seconds * (1 + 1e-9) and lower.peak < best.peak:
            best = replace(lower, problem=problem)
        else:
            low = limit
    # Orders with equal spans may have different periods, which are simulated once.
    by_period = problem.objective == "period" and best is not fastest
    return fastest if by_period and _period(best) > _period(fastest) * (1 + 1e-9) else best


def _best_under(fastest: Candidate, due: np.ndarray, limit: float, seed: int) -> Candidate:
    """The best order under a limit, or where that holds no microbatch under what one needs."""
    rows = zip(fastest.problem.arrays.smallest_limits, fastest.problem.limits, strict=True)
    problem = fastest.problem.limited(tuple(max(least, min(limit, limit_here)) for least, limit_here in rows))
    orders = (dispatch(problem.arrays, due, problem.limits, ahead) for ahead in LOOKAHEADS)
    lists = filter(None, (judged(problem, fastest.family, order) for order in orders))
    best = min(lists, key=lambda one: one.key, default=None)
    if best is None:
        return fastest
    if not fastest.seconds < best.seconds < _NEAR * fastest.seconds:
        return best
    order = improve(problem, best.order, min(ANNEALED * problem.ops, _MOST), seed)
    return judged(problem, fastest.family, order) or best


def _period(one: Candidate) -> float:
    schedule = one.problem.schedule(one.family, one.order.ops)
    return SearchResult(one.problem, simulate(schedule, one.problem.costs)).seconds
