"""Lower bounds on the time of a step whose microbatches have costs of their own, over all schedules.

1. *One rank.*  Each op of a rank begins no earlier than the longest path of its microbatch to it, and behind
   it the longest path of its microbatch follows.  The bound is that of one machine whose jobs may be
   interrupted: always the job with the longest path behind it, of those that can begin (Jackson 1955).

2. *The way of one microbatch* L through the ops F_0 … F_n, B_n … B_0 of all stages.  Any other microbatch i
   either has an op before the same op of L; at the first one, L has to wait for it: for f_0 of i at F_0; for
   f_s at a later F_s, as F_(s-1) of i came behind that of L; for f_n + b_n at B_n; for b_s at another B_s.
   Such waits add up.  Or B_0 of i comes behind that of L, and its W_0 as well.  So

       T ≥ way of L + w_0 of L + sum over i of min(f_0, …, f_n, b_n, …, b_0, b_0 + w_0)

   A message of L may take longer than an op of i and its message, which then comes first for nothing: such i
   do not count, or no messages do.

3. *By starts*, within the memory (:mod:`fxpipe.schedule.starts_bound`).

4. *Memory.*  A microbatch holds its bytes on a rank for at least the longest path from their F to their B,
   or from B to W.  All of these bytes · seconds lie between the earliest start and the latest end on the
   rank, under its limit.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from fxpipe.schedule.bound import distances, work_and_waits
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.dependencies import SECTIONS_PER_STAGE, sections_by_rank
from fxpipe.schedule.memory_bound import by_area
from fxpipe.schedule.starts_bound import by_starts
from fxpipe.schedule.step_paths import StepPaths


def lower_bound_of_each(
    each: Sequence[Costs], placement: tuple[int, ...], limits: Sequence[float] = ()
) -> float:
    """A lower bound on the makespan of any schedule of this placement, in seconds.

    each: of the microbatches.  limits: of each rank, in the unit of the costs' memory; none by default.
    """
    known = {id(costs): costs for costs in each}
    numbers = Counter(map(id, each))
    steps = [(_Way.of(costs, placement), numbers[key]) for key, costs in known.items()]
    bounds = [_one_rank(steps, mine) for mine in sections_by_rank(placement)]
    if all(way.is_chain for way, _ in steps):
        bounds += (_behind_one(way, steps) for way, _ in steps)
    paths = [(StepPaths.of(known[key], placement), numbers[key]) for key in known]
    bounds.append(by_starts(paths, limits))
    if limits and min(limits) < inf:
        bounds.append(by_area(paths, limits))
    return max(bounds)


@dataclass(frozen=True)
class _Way:
    """A microbatch: of each section the seconds, and the longest path to its start and from its end.

    ``delays``: of the messages on the way through all F and back through all B, by the section that gets one.
    ``is_chain``: whether there is that way.
    """

    seconds: list[float]
    head: list[float]
    tail: list[float]
    delays: Mapping[int, float]
    is_chain: bool

    @staticmethod
    def of(costs: Costs, placement: tuple[int, ...]) -> _Way:
        seconds, waits = work_and_waits(costs, placement)
        stages = len(placement)
        ways = [(3 * s, 3 * (s - 1)) for s in range(1, stages)]
        ways += [(3 * s + 1, 3 * (s + 1) + 1) for s in range(stages - 1)]
        waits_of = {target: dict(waits[target]).get(source) for target, source in ways}
        delays = {target: delay for target, delay in waits_of.items() if delay is not None}
        return _Way(seconds, *distances(waits, seconds), delays, len(delays) == len(ways))

    @property
    def long(self) -> float:
        """The way from the first F to the end of the last B, without messages."""
        return sum(x for section, x in enumerate(self.seconds) if section % SECTIONS_PER_STAGE < 2)

    @property
    def left(self) -> float:
        """What is added to the way of any other microbatch."""
        _, b, w = self.seconds[:SECTIONS_PER_STAGE]
        return min(b + w, *(x for k, x in enumerate(self.seconds) if k % SECTIONS_PER_STAGE < 2))

    def passes(self, other: _Way) -> bool:
        """Whether it can come before another microbatch, behind which it was, while a message of that is on
        its way."""
        return any(
            self.delays[target] + self.seconds[target - 3 if target % 3 == 0 else target + 3] < delay
            for target, delay in other.delays.items()
        )


def _behind_one(one: _Way, steps: Iterable[tuple[_Way, int]]) -> float:
    """The bound of rule 2 for one microbatch, with its messages or without them."""
    rest = [(way, number - (way is one)) for way, number in steps]
    first = one.long + one.seconds[2]
    behind = sum(way.left * number for way, number in rest if not way.passes(one))
    return max(first + sum(one.delays.values()) + behind, first + sum(way.left * n for way, n in rest))


def _one_rank(steps: Iterable[tuple[_Way, int]], sections: Sequence[int]) -> float:
    """The bound of rule 1."""
    jobs = [
        (way.head[s], way.tail[s], way.seconds[s] * number)
        for way, number in steps
        for s in sections
        if way.seconds[s]
    ]
    heapq.heapify(jobs)
    able: list[list[float]] = []  # the one with the longest path behind it first
    now, bound = 0.0, 0.0
    while jobs or able:
        now = now if able else max(now, jobs[0][0])
        while jobs and jobs[0][0] <= now:
            _, tail, seconds = heapq.heappop(jobs)
            heapq.heappush(able, [-tail, seconds])
        longest = able[0]
        until = min(now + longest[1], jobs[0][0] if jobs else inf)
        if until < now + longest[1]:
            longest[1] -= until - now
        else:
            bound = max(bound, until - longest[0])
            heapq.heappop(able)
        now = until
    return bound
