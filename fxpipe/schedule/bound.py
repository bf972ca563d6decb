"""A lower bound on the time of a step, over all schedules."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from fxpipe.errors import ScheduleError
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.dependencies import (
    SECTION_KINDS,
    SECTIONS_PER_STAGE,
    Needs,
    durations,
    needs,
    op_of_value,
)


def lower_bound(costs: Costs, placement: tuple[int, ...], microbatches: int) -> float:
    """A lower bound on the makespan of any schedule of this placement, in seconds.

    The maximum of the longest path of one microbatch, and for each rank the shortest path to its first op,
    plus all its work, plus the shortest path from its last op to the end of the step.
    Raises ScheduleError if the edges form a cycle.
    """
    lasts, waits = work_and_waits(costs, placement)
    head, tail = distances(waits, lasts)
    bounds = [h + last + t for h, last, t in zip(head, lasts, tail, strict=True)]
    own: dict[int, list[int]] = {}
    for section in range(len(lasts)):
        own.setdefault(placement[section // SECTIONS_PER_STAGE], []).append(section)
    for mine in own.values():
        work = microbatches * sum(lasts[i] for i in mine)
        bounds.append(min(head[i] for i in mine) + work + min(tail[i] for i in mine))
    return max(bounds)


def work_and_waits(costs: Costs, placement: tuple[int, ...]) -> tuple[list[float], list[Needs]]:
    """By section, its seconds and its dependencies."""
    table, times = needs(costs, placement), durations(costs)
    stages = range(len(placement))
    waits = [table[kind][stage] for stage in stages for kind in SECTION_KINDS]
    return [times[kind][stage] for stage in stages for kind in SECTION_KINDS], waits


def distances(waits: list[Needs], lasts: list[float]) -> tuple[list[float], list[float]]:
    """The longest path to each section's start, and from its end to the end of the step."""
    order = in_order(waits)
    head, tail = [0.0] * len(lasts), [0.0] * len(lasts)
    for section in order:
        head[section] = max((head[s] + lasts[s] + delay for s, delay in waits[section]), default=0.0)
    for section in reversed(order):
        for source, delay in waits[section]:
            tail[source] = max(tail[source], delay + lasts[section] + tail[section])
    return head, tail


def in_order(waits: Sequence[Needs]) -> tuple[int, ...]:
    """The sections in topological order.  Raises ScheduleError if there is a cycle."""
    graph = {section: [source for source, _ in sources] for section, sources in enumerate(waits)}
    try:
        return tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        cycle = " -> ".join(str(op_of_value(section, 1)).removesuffix(".0") for section in error.args[1])
        raise ScheduleError(f"the edges between the sections form a cycle: {cycle}") from None
