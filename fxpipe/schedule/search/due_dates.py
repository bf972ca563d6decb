"""Due dates for list scheduling: the times of a lone microbatch, slowed, stretched and repeated every
period.

A timetable is a point of the unit cube, so that to draw one, or to cross two, takes a line. The ranges
are wide and plain; none is fitted to any case.
"""

from __future__ import annotations

import numpy as np

from fxpipe.schedule.bound import in_order
from fxpipe.schedule.dependencies import SECTIONS_PER_STAGE, index
from fxpipe.schedule.engine.arrays import ScheduleArrays
from fxpipe.schedule.engine.dispatch_kernel import Timetable
from fxpipe.schedule.engine.kernel import Floats
from fxpipe.schedule.problem import Problem

_SHARE, _FAR = 0.2, 0.1  # of the numbers that are moved where two timetables are crossed, and how far


def cross(parents: Floats, number: int, random: np.random.Generator) -> Floats:
    """Points, one a row, each with the numbers of two of the parents, some of them moved a little."""
    one, other = parents[random.integers(len(parents), size=(2, number))]
    mixed = np.where(random.random(one.shape) < 0.5, one, other)
    moved = (random.random(one.shape) < _SHARE) * random.normal(0, _FAR, one.shape)
    points: Floats = np.clip(mixed + moved, 0, 1)
    return points


def timetable(problem: Problem, period: float) -> Timetable:
    """What all due dates of a problem share; ``period``: the least."""
    arrays, alone = problem.arrays, start_alone(problem.arrays)
    begin, steps = alone.copy(), 2 * arrays.stages
    begin[2::3] = begin[1::3]  # W is on its way beside its B
    order = np.unique(begin)
    return Timetable(
        alone,
        np.searchsorted(order, begin) * steps // len(order),
        steps,
        float(np.mean(arrays.seconds)),
        period,
        np.array(problem.limits, np.float64),
    )


def least_period(problem: Problem) -> float:
    """No schedule's mean time from microbatch to microbatch is shorter.

    It is the work of the busiest rank; or the memory · seconds that a microbatch takes on a rank at
    least, by the rank's limit.  Raises ScheduleError if the sections need each other in a cycle.
    """
    held = zip(_held_at_least(problem), problem.limits, strict=True)
    return max([problem.arrays.period, *(area / limit for area, limit in held if area)])


def _held_at_least(problem: Problem) -> list[float]:
    """Per rank: memory · seconds of one microbatch. What is held from one section to another is held for
    as long as the longest way between them takes.
    """
    arrays, placement = problem.arrays, problem.placement
    seconds = np.array(arrays.seconds)
    # From the start of one section to that of another.
    way = np.full((arrays.sections, arrays.sections), -np.inf)
    for section in in_order(arrays.needs):
        way[section, section] = 0.0
        for source, delay in arrays.needs[section]:
            np.maximum(way[:, section], way[:, source] + seconds[source] + delay, out=way[:, section])
    areas = [0.0] * arrays.ranks
    for stage, cost in enumerate(problem.costs.stages):
        f, b, w = (SECTIONS_PER_STAGE * stage + kind for kind in range(3))
        area = cost.saved_activations * (way[f, b] + seconds[b]) + cost.saved_for_weight * seconds[w]
        areas[placement[stage]] += float(area)
    for edge in problem.costs.edges:
        rank, source, target = placement[edge.source.stage], index(edge.source), index(edge.target)
        if rank == placement[edge.target.stage] and edge.bytes:
            areas[rank] += edge.bytes * max(0.0, float(way[source, target] - seconds[source]))
    return areas


def start_alone(arrays: ScheduleArrays) -> Floats:
    """Per section when it starts if there is one microbatch alone; W right behind what it needs."""
    start = np.zeros(arrays.sections)
    down, up = range(arrays.stages), reversed(range(arrays.stages))
    for section in (*(3 * s for s in down), *(3 * s + 1 for s in up), *(3 * s + 2 for s in down)):
        arrivals = (start[source] + arrays.seconds[source] + delay for source, delay in arrays.needs[section])
        start[section] = max(arrivals, default=0.0)
    return start
