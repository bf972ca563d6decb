"""Lower bounds on the time of a step, over all schedules that keep a memory limit.

Under a tight limit no rank can have enough microbatches on their way, whatever the order of its ops: so the
bound by starts (:mod:`fxpipe.schedule.starts_bound`), and that by area:

A microbatch holds its bytes on a rank for at least the longest path between the sections that allocate and
free them.  All of these bytes · seconds lie between the earliest start of a section on the rank and the
latest end, under the limit: T ≥ head + m · area ÷ limit + tail.  Where all amounts are multiples of one, the
limit is rounded down to a multiple.

Values that are offloaded leave the limit: with a link, only bytes that cannot leave count.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, inf

from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.dependencies import index, sections_of
from fxpipe.schedule.starts_bound import by_starts
from fxpipe.schedule.step_paths import StepPaths

_ROUNDING = 1e-9


def lower_bound_within(
    costs: Costs, placement: tuple[int, ...], microbatches: int, limits: Sequence[float]
) -> float:
    """A lower bound on the makespan of any schedule of this placement whose ranks keep their limits, in
    seconds; infinite where one microbatch does not fit.

    limits: of each rank, in the unit of the costs' memory.  Raises ScheduleError if the edges form a cycle.
    """
    bound = lower_bound(costs, placement, microbatches)
    if min(limits) == inf:
        return bound
    steps = [(StepPaths.of(costs, placement), microbatches)]
    return max(bound, by_starts(steps, limits), by_area(steps, limits))


def _held_on_rank(step: StepPaths) -> list[list[tuple[float, float]]]:
    """The bytes that a microbatch holds on each rank, and for how many seconds at least."""
    amounts_of: list[list[tuple[float, float]]] = [[] for _ in range(1 + max(step.rank))]
    ways: dict[int, dict[int, float]] = {}  # from a section's start to that of others
    for stage, cost in enumerate(step.stages):
        f, b, w = sections_of(stage)
        ways[f] = ways.get(f) or _ways(step, f)
        amounts_of[step.rank[f]] += [
            (cost.saved_activations, ways[f][b] + step.seconds[b]),
            (cost.saved_for_weight, step.seconds[w]),
        ]
    if step.costs.link is None:
        for edge in step.costs.edges:
            source, target = index(edge.source), index(edge.target)
            if edge.bytes and step.rank[source] == step.rank[target]:
                ways[source] = ways.get(source) or _ways(step, source)
                way = ways[source].get(target, 0.0) - step.seconds[source]
                amounts_of[step.rank[source]].append((edge.bytes, max(0.0, way)))
    return amounts_of


def by_area(steps: Sequence[tuple[StepPaths, int]], limits: Sequence[float]) -> float:
    """The bound by area, for microbatches of several kinds, so many of each."""
    paths, longest = [step for step, _ in steps], 0.0
    by_step = [(_held_on_rank(step), number) for step, number in steps]
    for rank, limit in enumerate(limits):
        amounts = [each for amounts_of, _ in by_step for each in amounts_of[rank]]
        area = sum(n * sum(size * seconds for size, seconds in amounts_of[rank]) for amounts_of, n in by_step)
        if not area or limit == inf:
            continue
        sections = [s for s, home in enumerate(paths[0].rank) if home == rank]
        head = min(step.head[s] for step in paths for s in sections)
        tail = min(step.tail[s] for step in paths for s in sections)
        most = _multiple(limit, [size for size, _ in amounts])
        longest = max(longest, head + area / most + tail if most else inf)
    return longest


def _ways(step: StepPaths, start: int) -> dict[int, float]:
    """The longest path from the start of ``start`` to that of each section that needs it."""
    paths_to = {start: 0.0}
    for s in step.order:
        paths = [paths_to[q] + step.seconds[q] + delay for q, delay in step.waits[s] if q in paths_to]
        if paths:
            paths_to[s] = max(paths)
    return paths_to


def _multiple(limit: float, amounts: Sequence[float]) -> float:
    """The limit, rounded down to a multiple of the least amount if all amounts are multiples of it."""
    sizes = [size for size in amounts if size]
    least = min(sizes)
    if any(abs(size / least - round(size / least)) > _ROUNDING for size in sizes):
        return limit
    return floor(limit / least * (1 + _ROUNDING)) * least
