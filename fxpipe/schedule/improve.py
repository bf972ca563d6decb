"""Local search on an order: ops move along the critical path, the memory limits kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxpipe.schedule.goal import Goal
from fxpipe.schedule.kernel import climb
from fxpipe.schedule.shop import Coded, Shop


def improve(
    shop: Shop,
    coded: Coded,
    microbatches: int,
    limits: Sequence[float],
    goal: Goal,
    tries: int,
) -> Coded:
    """The best order of so many tries.  On every stage the ops of a kind keep their order."""
    bounds = np.asarray(limits, np.float64)
    return climb(shop.tables(microbatches), coded, microbatches, bounds, goal.by_makespan, goal.enough, tries)
