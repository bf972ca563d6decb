"""A lower bound on the time of a step, over all schedules."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from fxpipe.errors import ScheduleError
from fxpipe.schedule.costs import Costs, Exchange
from fxpipe.schedule.dependencies import (
    SECTION_KINDS,
    SECTIONS_PER_STAGE,
    Needs,
    durations,
    needs,
    op_of_value,
    sections_by_rank,
)
from fxpipe.schedule.ops import OpKind

_W = SECTION_KINDS.index(OpKind.W)


def lower_bound(costs: Costs, placement: tuple[int, ...], microbatches: int) -> float:
    """A lower bound on the makespan of any schedule of this placement, in seconds.

    The maximum of the longest path of one microbatch, and for each rank the shortest path to its first op,
    plus all its work, plus the shortest path from its last op to the end of the step.  A path begins with the
    gather of a stage's parameters, and behind W it goes on with the sum of its gradients.
    Raises ScheduleError if the edges form a cycle.
    """
    lasts, waits = work_and_waits(costs, placement)
    stages = range(len(placement))
    exchanges = costs.exchanges or [Exchange(0.0)] * len(placement)
    first = [exchanges[stage].gather for stage in stages for _ in SECTION_KINDS]
    # W is the last of its stage's ops, so the last op of a rank is a W.
    behind = [exchanges[stage].sum * (kind is OpKind.W) for stage in stages for kind in SECTION_KINDS]
    head, tail = distances(waits, lasts, first, behind)
    bounds = [h + last + t for h, last, t in zip(head, lasts, tail, strict=True)]
    for mine in filter(None, sections_by_rank(placement)):
        work = microbatches * sum(lasts[i] for i in mine)
        bounds.append(
            min(head[i] for i in mine) + work + min(tail[i] for i in mine if i % SECTIONS_PER_STAGE == _W)
        )
    return max(bounds)


def work_and_waits(costs: Costs, placement: tuple[int, ...]) -> tuple[list[float], list[Needs]]:
    """The seconds and the dependencies of each section."""
    table, times = needs(costs, placement), durations(costs)
    stages = range(len(placement))
    waits = [table[kind][stage] for stage in stages for kind in SECTION_KINDS]
    return [times[kind][stage] for stage in stages for kind in SECTION_KINDS], waits


def distances(
    waits: list[Needs],
    lasts: list[float],
    first: Sequence[float] = (),
    behind: Sequence[float] = (),
) -> tuple[list[float], list[float]]:
    """The longest path to each section's start, and from its end to the end of the step.

    first: when a section can begin.  behind: what follows it.  None by default.
    """
    order = in_order(waits)
    head, tail = [*first] or [0.0] * len(lasts), [*behind] or [0.0] * len(lasts)
    for section in order:
        for source, delay in waits[section]:
            head[section] = max(head[section], head[source] + lasts[source] + delay)
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
