"""Due dates for list scheduling: the times of a lone microbatch, slowed, stretched and repeated every
period.

A timetable is a point of the unit cube, so that to draw one, or to cross two, takes a line. The ranges
are wide and plain; none is fitted to any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random

import numpy as np

from fxpipe.schedule.arrays import OpIds, ScheduleArrays
from fxpipe.schedule.bound import in_order
from fxpipe.schedule.dependencies import SECTIONS_PER_STAGE, index
from fxpipe.schedule.dispatch import dispatch
from fxpipe.schedule.kernel import Floats
from fxpipe.schedule.problem import Problem

Point = tuple[float, ...]

_NUMBERS = 15
_SHARE, _FAR = 0.2, 0.1  # of the numbers that are moved where two timetables are crossed, and how far


def draw(random: Random) -> Point:
    """A timetable at random."""
    return tuple(random.random() for _ in range(_NUMBERS))


def cross(one: Point, other: Point, random: Random) -> Point:
    """A timetable with the numbers of two, some of them moved a little."""

    def moved(x: float) -> float:
        return min(1.0, max(0.0, x + random.gauss(0, _FAR))) if random.random() < _SHARE else x

    return tuple(moved(random.choice(pair)) for pair in zip(one, other, strict=True))


@dataclass(frozen=True, eq=False)
class Timetable:
    """Makes orders for a problem from points."""

    problem: Problem

    @cached_property
    def alone(self) -> Floats:
        """Per section when it starts if there is one microbatch alone."""
        return start_alone(self.problem.arrays)

    @cached_property
    def steps(self) -> Floats:
        """Per section its place on the way of a microbatch, from 0 to 1; W beside its B."""
        begin = self.alone.copy()
        begin[2::3] = begin[1::3]
        order = np.unique(begin)
        return np.searchsorted(order, begin) / len(order)

    @cached_property
    def period(self) -> float:
        return least_period(self.problem)

    def order(self, point: Point) -> OpIds:
        """The order of list scheduling with the point's due dates."""
        arrays, m, ranks = self.problem.arrays, self.problem.microbatches, self.problem.ranks
        slow, *waits, weight, head, tail, head_pace, tail_pace, late, spare, memory, b, w = point
        unit, period = float(np.mean(arrays.seconds)), self.period * (1 + 0.25 * slow**2)
        # The way of a microbatch: each quarter of it may be slower.
        quarters = np.array([1.5 * _half(x) ** 2 * unit for x in waits])
        steps = 2 * arrays.stages
        places = np.minimum((self.steps * steps).astype(int), steps - 1)
        start = self.alone + np.cumsum(quarters[np.arange(steps) * 4 // steps])[places]
        start[2::3] += 3 * _half(weight) * period
        # The pace: microbatches at the head and at the tail may come faster one after the other.
        pace = np.ones(m)
        pace[: int(head * ranks)] = 0.25 + 0.75 * head_pace
        pace[max(0, m - int(tail * ranks)) :] = 0.25 + 0.75 * tail_pace
        pace[0] = 0.0
        due = start[:, None] + period * np.cumsum(pace)
        due[2::3, max(0, m - int(2 * _half(late) * ranks)) :] += 2 * due.max()  # the last W behind all else
        # The memory: some of it may stay free, and no rank needs more than some microbatches a rank.
        least = np.array([arrays.smallest_limit(rank) for rank in range(ranks)])
        most = np.minimum(
            np.asarray(self.problem.limits) - _half(spare) * least, (1 + memory) * ranks * least
        )
        return dispatch(arrays, m, due.ravel(), np.maximum(most, least), (1.001, 0.7 * b, 0.7 * w))


def least_period(problem: Problem) -> float:
    """No schedule's mean time from microbatch to microbatch is shorter.

    It is the work of the busiest rank; or the memory · seconds that a microbatch takes on a rank at
    least, by the rank's limit.
    """
    if not problem.is_limited:
        return problem.arrays.period
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


def _half(x: float) -> float:
    """0 for half of the draws, else up to 1."""
    return max(0.0, 2 * x - 1)
