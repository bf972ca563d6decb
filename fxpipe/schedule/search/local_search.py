"""Local search on an order: an op of the critical path jumps over some of its neighbors, the memory
limits kept.

Simulated annealing. The longest path through the moved ops is estimated first, as in job shop scheduling
(Balas and Vazirani 1998); the ops are run again only if the estimate is accepted.
"""

from __future__ import annotations

import numpy as np

from fxpipe.schedule.engine.annealing import anneal
from fxpipe.schedule.engine.order import Order
from fxpipe.schedule.problem import Problem

# How much worse an order may be: at first, of a mean op's time; at last, of that at first.
_HOT, _COLD = 0.8, 0.1
_GAIN = 0.4  # the same, of the distance to the bound
_SHORT = 2e-4  # the same for each look at an op: in the heat of a short search a good order would be lost


def improve(problem: Problem, order: Order, work: int, seed: int = 0) -> Order:
    """The best order that annealing meets within ``work``, the number of ops that it may look at.

    ``order`` keeps the problem's limits.  On every stage the ops of a kind keep their order.
    """
    done, arrays = order.run(), order.arrays
    assert done is not None, "an order to improve can progress"
    # Temperatures are in this unit, so that they suit steps of any length.
    unit = float(np.mean(arrays.seconds))
    # Close to the bound, a worse order would not be made up for.
    gain, short = problem.time(done) - problem.bound, work / len(order.op_ids)
    hot = max(1e-3 * unit, min(_HOT * unit, _GAIN * gain, _SHORT * unit * short))
    limits, goal = np.asarray(problem.limits, np.float64), (problem.by_makespan, problem.good_enough)
    op_ids = anneal(
        # F, B and W of a microbatch keep their order in every move, so what they need of each other never
        # binds.
        arrays.tables_between_stages,
        order.op_ids,
        arrays.microbatches,
        limits,
        *goal,
        work,
        seed,
        hot,
        _COLD * hot,
    )
    return Order(arrays, op_ids)
