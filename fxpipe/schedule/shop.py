"""Costs and placement as flat arrays, and orders as numbers: what the searches of this folder compute on.

Sections are counted as in :mod:`fxpipe.schedule.dependencies`, 3·stage + 0, 1, 2 for F, B, W.  An op is
the number of its value, section · microbatches + microbatch; a *coded order* is a list of such per rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from fxpipe.schedule.costs import Costs
from fxpipe.schedule.dependencies import SECTION_KINDS, SECTIONS_PER_STAGE, durations, index, needs
from fxpipe.schedule.ops import Op, OpKind, Order
from fxpipe.schedule.placement import stages_of

Coded = list[list[int]]
"""Per rank the ops that it runs, in order."""


@dataclass(frozen=True)
class Shop:
    """The machines (ranks) and jobs (microbatches) of a schedule; all per section, but for what says else.

    ``hold`` and ``kept`` are per stage: what a rank holds from F to B and from B to W, ``hold`` with
    what the stage hands to other stages of its rank.
    """

    ranks: int
    stages: int
    seconds: tuple[float, ...]
    needs: tuple[tuple[tuple[int, float], ...], ...]
    feeds: tuple[tuple[tuple[int, float], ...], ...]
    lead: tuple[float, ...]
    rank: tuple[int, ...]
    own: tuple[tuple[int, ...], ...]
    hold: tuple[float, ...]
    kept: tuple[float, ...]
    at_start: tuple[float, ...]
    at_end: tuple[float, ...]

    @property
    def sections(self) -> int:
        return SECTIONS_PER_STAGE * self.stages

    def work(self, rank: int) -> float:
        """Seconds that one microbatch takes on a rank."""
        first = [SECTIONS_PER_STAGE * stage for stage in self.own[rank]]
        return sum(sum(self.seconds[s : s + SECTIONS_PER_STAGE]) for s in first)

    @property
    def period(self) -> float:
        """The work of the busiest rank: no repeated block can be shorter."""
        return max(self.work(rank) for rank in range(self.ranks))

    def of_ops(self, microbatches: int) -> tuple[list[float], list[list[tuple[int, float]]]]:
        """Per op its seconds, and the ops whose results it needs with the times that those take to arrive."""
        found = self._of_ops.get(microbatches)
        if found is None:
            js = range(microbatches)
            seconds = [time for time in self.seconds for _ in js]
            needs = [[(s * microbatches + j, delay) for s, delay in few] for few in self.needs for j in js]
            found = self._of_ops[microbatches] = seconds, needs
        return found

    @cached_property
    def _of_ops(self) -> dict[int, tuple[list[float], list[list[tuple[int, float]]]]]:
        return {}

    def smallest_limit(self, rank: int) -> float:
        """With so much memory a rank can go on whatever the others do."""
        return sum(self.hold[stage] for stage in self.own[rank])


def shop(costs: Costs, placement: tuple[int, ...]) -> Shop:
    """Raises ScheduleError where costs and placement do not agree."""
    stages, waits, lasts = range(len(placement)), needs(costs, placement), durations(costs)
    table = tuple(waits[kind][stage] for stage in stages for kind in SECTION_KINDS)
    seconds = tuple(lasts[kind][stage] for stage in stages for kind in SECTION_KINDS)
    feeds: list[list[tuple[int, float]]] = [[] for _ in table]
    for section, sources in enumerate(table):
        for source, delay in sources:
            feeds[source].append((section, delay))
    hold = [max(cost.saved, cost.kept) for cost in costs.stages]
    at_start, at_end = [0.0] * len(table), [0.0] * len(table)
    for stage, cost in enumerate(costs.stages):
        at_start[3 * stage] = cost.saved
        at_end[3 * stage + 1] = cost.kept - cost.saved
        at_end[3 * stage + 2] = -cost.kept
    for edge in costs.edges:
        if placement[edge.source.stage] == placement[edge.target.stage] and edge.bytes:
            hold[edge.source.stage] += edge.bytes
            at_end[index(edge.source)] += edge.bytes
            at_start[index(edge.target)] -= edge.bytes
    return Shop(
        ranks=max(placement) + 1,
        stages=len(placement),
        seconds=seconds,
        needs=table,
        feeds=tuple(map(tuple, feeds)),
        lead=tuple(min((seconds[s] + d for s, d in sources), default=0.0) for sources in table),
        rank=tuple(placement[section // SECTIONS_PER_STAGE] for section in range(len(table))),
        own=stages_of(placement),
        hold=tuple(hold),
        kept=tuple(cost.kept for cost in costs.stages),
        at_start=tuple(at_start),
        at_end=tuple(at_end),
    )


def decode(coded: Coded, microbatches: int) -> Order:
    """Numbers to ops."""
    table: dict[int, Op] = {}
    for ops in coded:
        for value in ops:
            section, microbatch = divmod(value, microbatches)
            kind = SECTION_KINDS[section % SECTIONS_PER_STAGE]
            table[value] = Op(kind, section // SECTIONS_PER_STAGE, microbatch)
    return tuple(tuple(table[value] for value in ops) for ops in coded)


def encode(order: Order, microbatches: int) -> Coded:
    """Ops to numbers; a BW becomes its B and its W."""
    coded: Coded = []
    for ops in order:
        out: list[int] = []
        for op in ops:
            first = SECTIONS_PER_STAGE * op.stage
            match op.kind:
                case OpKind.F:
                    out.append(first * microbatches + op.microbatch)
                case OpKind.B:
                    out.append((first + 1) * microbatches + op.microbatch)
                case OpKind.W:
                    out.append((first + 2) * microbatches + op.microbatch)
                case OpKind.BW:
                    out.append((first + 1) * microbatches + op.microbatch)
                    out.append((first + 2) * microbatches + op.microbatch)
        coded.append(out)
    return coded


@dataclass(frozen=True, slots=True)
class Run:
    """When the ops of a coded order ran.  ``cause`` is per op the one whose end let it start, or -1."""

    first: list[float]
    free: list[float]
    end: list[float]
    cause: list[int]

    @property
    def span(self) -> float:
        return max(last - first for last, first in zip(self.free, self.first, strict=True))

    @property
    def makespan(self) -> float:
        return max(self.free)


def run(
    shop: Shop, coded: Coded, microbatches: int, known: Run | None = None, since: float = 0.0
) -> Run | None:
    """Every op as early as its rank's order lets it; None where the orders block each other.

    ``known`` is a run of orders that differ from these in nothing that ended before ``since`` in it.
    """
    seconds, needs = shop.of_ops(microbatches)
    at, free, first = [0] * shop.ranks, [0.0] * shop.ranks, [0.0] * shop.ranks
    if known is None:
        end = [-1.0] * len(seconds)
        cause = [-1] * len(seconds)
    else:
        end, cause = known.end[:], known.cause[:]
        for rank, ops in enumerate(coded):
            at[rank] = done = bisect_left(ops, since, key=known.end.__getitem__)
            if done:
                first[rank], free[rank] = known.first[rank], known.end[ops[done - 1]]
            for value in ops[done:]:
                end[value] = -1.0
    waiting: dict[int, list[int]] = {}
    runnable = list(range(shop.ranks))
    while runnable:
        rank = runnable.pop()
        ops, i, now = coded[rank], at[rank], free[rank]
        last, before = len(ops), ops[at[rank] - 1] if at[rank] else -1
        while i < last:
            value = ops[i]
            start, why = now, before
            for source, delay in needs[value]:
                arrival = end[source]
                if arrival < 0:
                    waiting.setdefault(source, []).append(rank)
                    break
                arrival += delay
                if arrival > start:
                    start, why = arrival, source
            else:
                now = start + seconds[value]
                end[value], cause[value] = now, why
                if not i:
                    first[rank] = start
                if value in waiting:
                    runnable.extend(waiting.pop(value))
                before = value
                i += 1
                continue
            break
        at[rank], free[rank] = i, now
    return None if waiting else Run(first, free, end, cause)


def peaks(shop: Shop, coded: Coded, microbatches: int) -> list[float]:
    """Per rank the most that is live at a time; it depends on the rank's own order alone."""
    return [peak(shop, ops, microbatches) for ops in coded]


def peak(shop: Shop, ops: Sequence[int], microbatches: int) -> float:
    at_start, at_end, live, most = shop.at_start, shop.at_end, 0.0, 0.0
    for value in ops:
        section = value // microbatches
        live += at_start[section]
        if live > most:
            most = live
        live += at_end[section]
        if live > most:
            most = live
    return most


def fits(shop: Shop, coded: Coded, microbatches: int, limits: Sequence[float]) -> bool:
    """Are all ranks within their limits, but for rounding?"""
    return all(
        limit == inf or peak(shop, ops, microbatches) <= limit * (1 + 1e-9)
        for ops, limit in zip(coded, limits, strict=True)
    )
