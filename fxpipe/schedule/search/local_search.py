"""Local search on an order: an op of the critical path jumps over some of its neighbors, the memory
limits kept.

Simulated annealing. What a jump does to the longest path through the ops that it moves is estimated
first, as in job shop scheduling (Balas and Vazirani 1998); only where the estimate is accepted are the
ops run again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxpipe.schedule.engine.arrays import OpIds, ScheduleArrays, run
from fxpipe.schedule.engine.kernel import anneal
from fxpipe.schedule.search.goal import Goal

# How much worse an order may be: at first, of a mean op's time; at last, of that at first.
_HOT, _COLD = 0.8, 0.1
_GAIN = 0.4  # the same of what there is to gain
_SHORT = 2e-4  # the same for each look at an op: in the heat of a short search a good order would be lost


def improve(
    arrays: ScheduleArrays,
    order: OpIds,
    microbatches: int,
    limits: Sequence[float],
    goal: Goal,
    work: int,
    seed: int = 0,
) -> OpIds:
    """The best order that annealing meets within ``work``, the number of ops that it may look at.

    ``order`` keeps the limits.  On every stage the ops of a kind keep their order.
    """
    done = run(arrays, order, microbatches)
    assert done is not None, "an order to improve can progress"
    unit = float(np.mean(arrays.seconds))
    gain, short = goal.time(done) - goal.bound, work / len(order)
    hot = max(1e-3 * unit, min(_HOT * unit, _GAIN * gain, _SHORT * unit * short))
    bounds = np.asarray(limits, np.float64)
    tables, m = arrays.tables(microbatches), microbatches
    return anneal(tables, order, m, bounds, goal.by_makespan, goal.good_enough, work, seed, hot, _COLD * hot)
