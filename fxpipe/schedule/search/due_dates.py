"""Due dates for list scheduling: the times of a lone microbatch, slowed, stretched and repeated every
period.

A timetable is a point of the unit cube, so that to draw one, or to cross two, takes a line. The ranges
are wide and plain; none is fitted to any case.
"""

from __future__ import annotations

import numpy as np

from fxpipe.schedule.engine.arrays import ScheduleArrays
from fxpipe.schedule.engine.dispatch_kernel import Timetable
from fxpipe.schedule.engine.tables import Floats
from fxpipe.schedule.problem import Problem

_MOVED, _FAR = 0.2, 0.1  # of the numbers that are moved where two timetables are crossed, and how far


def cross(parents: Floats, number: int, random: np.random.Generator) -> Floats:
    """Points, one a row, each with the numbers of two of the parents, some of them moved a little."""
    one, other = parents[random.integers(len(parents), size=(2, number))]
    mixed = np.where(random.random(one.shape) < 0.5, one, other)
    moved = (random.random(one.shape) < _MOVED) * random.normal(0, _FAR, one.shape)
    points: Floats = np.clip(mixed + moved, 0, 1)
    return points


def timetable(problem: Problem) -> Timetable:
    """The part that all due dates of a problem share."""
    arrays, alone = problem.arrays, start_alone(problem.arrays)
    begin, steps = alone.copy(), 2 * arrays.stages
    # The steps of the way are those of F and B: a W has no place of its own there.
    begin[2::3] = begin[1::3]  # W is on its way beside its B
    order = np.unique(begin)
    return Timetable(
        alone,
        np.searchsorted(order, begin) * steps // len(order),
        steps,
        float(np.mean(arrays.seconds)),
        problem.least_period,
        np.array(problem.limits, np.float64),
    )


def start_alone(arrays: ScheduleArrays) -> Floats:
    """The start of each section where a microbatch is alone; W starts as soon as its values have arrived."""
    start = np.zeros(arrays.sections)
    down, up = range(arrays.stages), reversed(range(arrays.stages))
    for section in (*(3 * s for s in down), *(3 * s + 1 for s in up), *(3 * s + 2 for s in down)):
        arrivals = (start[source] + arrays.seconds[source] + delay for source, delay in arrays.needs[section])
        start[section] = max(arrivals, default=0.0)
    return start
