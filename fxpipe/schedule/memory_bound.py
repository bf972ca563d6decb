"""A lower bound on the time of a step, over all schedules that keep a memory limit.

Under a tight limit no rank can have enough microbatches on their way, whatever the order of its ops.  The
bound follows the *j-th start* of each section: of the times at which its m microbatches start, the j-th
smallest, X_s[j] with j from 0.  Whatever order a schedule runs them in:

1. X_t[j] ≥ X_s[j] + seconds(s) + delay, for a section t that needs s: each microbatch obeys it, and if
   y_i ≥ x_i + c for all i, the same holds of the j-th smallest.
2. X_s[j + 1] ≥ X_s[j] + seconds(s): one rank runs all ops of s, one at a time.
3. When F of a stage b starts for the (n + 1)-th time, the microbatch holds ``own`` bytes on its rank.  For a
   stage a there that is on its way (F_a before F_b before B_a), others hold their activations, x of them
   from F_a to B_a and y from B_a to W_a, where own + x · saved + y · saved for W ≤ limit.  So all but 1 + x
   of the n + 1 have ended B_a, and all but 1 + x + y have ended W_a.  Of all ends of B_a the (n - x)-th
   smallest is no later than that, and of W_a the (n - x - y)-th: X_Fb[n] is at least the least, over all
   such x and y, of the later of these two.
4. X_s[j] + seconds(s) ≥ head + (j + 1) · before, as j + 1 microbatches have ended s by then and with it all
   sections of its rank that lead to s, ``before`` seconds of them with s, none earlier than ``head``.
5. T ≥ X_s[j] + (m - j) · after + tail, as m - j microbatches have not started s before X_s[j], nor what
   follows on the same rank, ``after`` seconds with s; ``tail`` is the shortest way from there to the end.

All but the last go from lower to higher j, or along the edges, so one sweep finds the least X.

6. A microbatch holds its bytes on a rank for at least the longest path between the sections that allocate
   and free them.  All of these bytes · seconds lie between the earliest start of a section on the rank and
   the latest end, under the limit: T ≥ head + m · area ÷ limit + tail.  Where all amounts are multiples of
   one, the limit is rounded down to a multiple.

Values that are offloaded leave the limit: with a link, only bytes that cannot leave count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import floor, inf

from fxpipe.schedule.bound import distances, in_order, lower_bound, work_and_waits
from fxpipe.schedule.costs import Costs, StageCost
from fxpipe.schedule.dependencies import SECTIONS_PER_STAGE, Needs, index, sections_of

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
    step = StepPaths.of(costs, placement)
    return max(bound, _by_starts(step, microbatches, limits), by_area([(step, microbatches)], limits))


@dataclass(frozen=True)
class StepPaths:
    """A step as the rules read it: each section's rank, seconds, needs, and longest path to its start and
    from its end; each stage's costs, with the bytes alone that stay on the rank."""

    rank: tuple[int, ...]
    seconds: list[float]
    waits: list[Needs]
    order: tuple[int, ...]
    head: list[float]
    tail: list[float]
    stages: tuple[StageCost, ...]
    costs: Costs

    @staticmethod
    def of(costs: Costs, placement: tuple[int, ...]) -> StepPaths:
        seconds, waits = work_and_waits(costs, placement)
        head, tail = distances(waits, seconds)
        ranks = tuple(placement[section // SECTIONS_PER_STAGE] for section in range(len(seconds)))
        return StepPaths(ranks, seconds, waits, in_order(waits), head, tail, _staying(costs), costs)


def _staying(costs: Costs) -> tuple[StageCost, ...]:
    """The stages with the bytes that no schedule can offload."""
    if costs.link is None:
        return costs.stages
    return tuple(
        StageCost(
            cost.forward,
            cost.backward,
            cost.weight,
            max(0.0, cost.saved_activations - cost.offloadable - cost.offloadable_for_weight),
            max(0.0, cost.saved_for_weight - cost.offloadable_for_weight),
        )
        for cost in costs.stages
    )


def _by_starts(step: StepPaths, microbatches: int, limits: Sequence[float]) -> float:
    """The bound of rules 1 to 5."""
    before, after, exclusions = _on_own_rank(step, limits, microbatches)
    if any(not ways for waits in exclusions.values() for _, ways in waits):
        return inf
    starts = [[0.0] * microbatches for _ in step.seconds]

    def end(section: int, j: int) -> float:
        return starts[section][j] + step.seconds[section] if j >= 0 else 0.0

    longest = 0.0
    for j in range(microbatches):
        for s in step.order:
            first, work = before[s]
            x = first + (j + 1) * work - step.seconds[s]
            for source, delay in step.waits[s]:
                x = max(x, end(source, j) + delay)
            x = max(x, end(s, j - 1))
            for b, ways in exclusions.get(s, ()):
                x = max(x, _earliest(ways, partial(_at_once, end, b, j)))
            starts[s][j] = x
            left, last = after[s]
            longest = max(longest, x + (microbatches - j) * left + last)
    return longest


def _at_once(end: Callable[[int, int], float], b: int, j: int, way: tuple[int, int]) -> tuple[float, float]:
    """The ends of B and of W that a way to hold waits for."""
    return end(b, j - way[0]), end(b + 1, j - way[1])


def _earliest(
    ways: Sequence[tuple[int, int]], ends: Callable[[tuple[int, int]], tuple[float, float]]
) -> float:
    """The least, over ways, of the later of the two ends.

    From way to way B's end comes earlier.  Where W's comes later, as mostly, the least is where they cross.
    """
    if ways[0][1] < ways[-1][1]:
        return min(max(ends(way)) for way in ways)
    low, high = 0, len(ways) - 1  # the first way whose end of W is not before that of B, if there is one
    while low < high:
        middle = (low + high) // 2
        b, w = ends(ways[middle])
        low, high = (low, middle) if w >= b else (middle + 1, high)
    return min(max(ends(way)) for way in ways[max(0, low - 1) : low + 1])


#: By section F, for stages on their way there: B of the stage, and how many starts of F before a start B and
#: W have ended at the latest; several such pairs, one of which holds.
_Exclusions = dict[int, list[tuple[int, list[tuple[int, int]]]]]


def _ways_to_hold(cost: StageCost, room: float, microbatches: int) -> list[tuple[int, int]] | None:
    """The pairs (1 + x, 1 + x + y) of rule 3; None if all others can hold theirs.  room: without ``own``."""
    saved, for_weight = cost.saved_activations, cost.saved_for_weight
    most = _fit(room, saved, microbatches)
    if most >= microbatches and _fit(room, for_weight, microbatches) >= microbatches:
        return None
    least = 0 if for_weight else max(0, most)  # without W, the most is the weakest
    numbers = [(x, _fit(room - x * saved, for_weight, microbatches)) for x in range(least, most + 1)]
    return [(1 + x, 1 + x + y) for x, y in numbers]


def _fit(room: float, size: float, most: int) -> int:
    """The number that fits into a room, at most ``most``; -1 where the room is negative."""
    if room < -_ROUNDING * abs(size):
        return -1
    return most if size * most <= room else floor(room / size + _ROUNDING)


def _on_own_rank(
    step: StepPaths, limits: Sequence[float], microbatches: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]], _Exclusions]:
    """The (head, before) of rule 4 and (after, tail) of rule 5 by section, and what rule 3 compares by F."""
    leads = _reached(step.order, [[s for s, _ in sources] for sources in step.waits])
    follows: list[list[int]] = [[] for _ in step.waits]
    for section, sources in enumerate(step.waits):
        for source, _ in sources:
            follows[source].append(section)
    later = _reached(tuple(reversed(step.order)), follows)
    before, after = [], []
    exclusions: _Exclusions = {}
    for s, rank in enumerate(step.rank):
        beside = [q for q in leads[s] if step.rank[q] == rank]
        before.append((min(step.head[q] for q in beside), sum(step.seconds[q] for q in beside)))
        beside = [q for q in later[s] if step.rank[q] == rank]
        after.append((sum(step.seconds[q] for q in beside), min(step.tail[q] for q in beside)))
        if s % SECTIONS_PER_STAGE == 0 and limits[rank] < inf:
            on_way = [q for q in leads[s] if q % SECTIONS_PER_STAGE == 0 and q + 1 in later[s]]
            on_way = [q for q in on_way if step.rank[q] == rank]
            costs = {q: step.stages[q // SECTIONS_PER_STAGE] for q in on_way}
            room = limits[rank] * (1 + _ROUNDING) - sum(cost.saved_activations for cost in costs.values())
            ways = {q: _ways_to_hold(cost, room, microbatches) for q, cost in costs.items()}
            exclusions[s] = [(q + 1, pairs) for q, pairs in ways.items() if pairs is not None]
    return before, after, exclusions


def _reached(order: Sequence[int], along: Sequence[Sequence[int]]) -> list[set[int]]:
    """Each section with all that it reaches; ``order``: those first that others reach."""
    reached: list[set[int]] = [set() for _ in along]
    for s in order:
        reached[s] = {s}.union(*(reached[q] for q in along[s]))
    return reached


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
    """The bound of rule 6, for microbatches of several kinds, so many of each."""
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
