"""Costs and placement as arrays: the data that the searches compute on.

Sections are numbered as in :mod:`fxpipe.schedule.dependencies`, 3·stage + 0, 1, 2 for F, B, W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fxpipe.schedule.bound import in_order, work_and_waits
from fxpipe.schedule.costs import Costs, Exchange
from fxpipe.schedule.dependencies import SECTIONS_PER_STAGE, Needs, index
from fxpipe.schedule.engine.tables import Tables
from fxpipe.schedule.ops import Phase
from fxpipe.schedule.placement import stages_of
from fxpipe.schedule.simulation.memory import memory_changes


@dataclass(frozen=True)
class ScheduleArrays:
    """Costs, placement and number of microbatches as arrays.

    Per section: ``seconds`` to ``rank``, the memory changes ``at_start`` and ``at_end``, ``gathered``, when
    the parameters of its stage are there, and the seconds of the ``sum`` that follows the last of its ops: of
    the gradients of its stage, if it is a W.  Per rank: its stages (``placed``), and the seconds of its
    ``update`` that count as part of its span.  Per stage: ``hold`` and ``hold_for_w``, the most that a rank
    holds from F to B and from B to W, including values that the stage and later stages of its rank hand each
    other; ``joined``: instead of both, if B and W are one op.
    """

    ranks: int
    stages: int
    microbatches: int
    seconds: tuple[float, ...]
    needs: tuple[tuple[tuple[int, float], ...], ...]
    feeds: tuple[tuple[tuple[int, float], ...], ...]
    lead: tuple[float, ...]
    rank: tuple[int, ...]
    placed: tuple[tuple[int, ...], ...]
    hold: tuple[float, ...]
    hold_for_w: tuple[float, ...]
    joined: tuple[float, ...]
    at_start: tuple[float, ...]
    at_end: tuple[float, ...]
    update: tuple[float, ...]
    gathered: tuple[float, ...]
    sum: tuple[float, ...]

    @property
    def sections(self) -> int:
        return SECTIONS_PER_STAGE * self.stages

    def work(self, rank: int) -> float:
        """Seconds of one microbatch on a rank."""
        first = [SECTIONS_PER_STAGE * stage for stage in self.placed[rank]]
        return sum(sum(self.seconds[s : s + SECTIONS_PER_STAGE]) for s in first)

    @cached_property
    def period(self) -> float:
        """The work of the busiest rank on one microbatch: a lower bound on a repeated block."""
        return max(self.work(rank) for rank in range(self.ranks))

    @cached_property
    def tables(self) -> Tables:
        """The arrays in the layout of the compiled loops."""
        return Tables(
            section=np.repeat(np.arange(self.sections), self.microbatches),
            rank=np.array(self.rank),
            **self._rows(self.needs, self.feeds),
            placed_at=np.cumsum([0, *map(len, self.placed)]),
            placed=np.array([stage for stages in self.placed for stage in stages]),
            **dict[str, Any]({name: np.array(getattr(self, name), np.float64) for name in _FLOATS}),
        )

    @cached_property
    def tables_between_stages(self) -> Tables:
        """The tables without what the ops of a stage need of each other, for loops over orders that have each
        F before its B and each B before its W: there it starts no op later."""
        needs, feeds = (
            [
                tuple(pair for pair in row if pair[0] // SECTIONS_PER_STAGE != section // SECTIONS_PER_STAGE)
                for section, row in enumerate(table)
            ]
            for table in (self.needs, self.feeds)
        )
        return self.tables._replace(**self._rows(needs, feeds))

    def _rows(self, needs: Sequence[Needs], feeds: Sequence[Needs]) -> dict[str, Any]:
        """What sections need and feed, by the names of the tables."""
        fed = [pair for row in feeds for pair in row]
        return {
            **_rows("need", needs, self.microbatches),
            **_rows("feed", feeds, self.microbatches),
            "feed_way": np.array([delay + self.seconds[other] for other, delay in fed], np.float64),
            "feed_rank": np.array([self.rank[other] for other, _ in fed], np.int64),
        }

    @cached_property
    def smallest_limits(self) -> tuple[float, ...]:
        """The memory with which each rank can always progress: one microbatch in all its stages."""
        return tuple(sum(self.hold[stage] for stage in stages) for stages in self.placed)

    @cached_property
    def smallest_joined(self) -> tuple[float, ...]:
        """The same of schedules in which all B and W are one op: no schedule needs less."""
        return tuple(sum(self.joined[stage] for stage in stages) for stages in self.placed)


#: The fields of sections and stages, and those that the tables have as they are.
_PER_SECTION = (
    "seconds", "lead", "rank", "hold", "hold_for_w", "joined", "at_start", "at_end", "gathered", "sum",
)  # fmt: skip
_FLOATS = ("seconds", "lead", "at_start", "at_end", "hold", "hold_for_w", "update", "gathered", "sum")


def schedule_arrays(
    costs: Costs,
    placement: tuple[int, ...],
    microbatches: int,
    *,
    updates: bool = False,
    exchanges: bool = False,
) -> ScheduleArrays:
    """The arrays of costs and placement.  updates: whether those of the costs count as part of a rank's span.
    exchanges: the same of what replicas exchange; those for each use count once, from below.

    Raises ScheduleError if costs and placement do not agree.
    """
    ranks = range(max(placement) + 1)
    seconds, waits = work_and_waits(costs, placement)
    table = _in_model_order(waits, placement)
    feeds: list[list[tuple[int, float]]] = [[] for _ in table]
    for section, sources in enumerate(table):
        for source, delay in sources:
            feeds[source].append((section, delay))
    for_weight, handed = [cost.saved_for_weight for cost in costs.stages], [0.0 for _ in costs.stages]
    for edge in costs.edges:
        if placement[edge.source.stage] == placement[edge.target.stage]:
            # Of the two stages, the earlier one's F runs first and its B last.
            handed[min(edge.source.stage, edge.target.stage)] += edge.bytes
            if edge.target.phase is Phase.W:
                for_weight[edge.target.stage] += edge.bytes
    at_start, at_end = memory_changes(costs, placement)
    exchanged = costs.exchanges if exchanges and costs.exchanges else (Exchange(0.0),) * len(placement)
    return ScheduleArrays(
        ranks=len(ranks),
        stages=len(placement),
        microbatches=microbatches,
        seconds=tuple(seconds),
        needs=table,
        feeds=tuple(map(tuple, feeds)),
        lead=tuple(min((seconds[s] + d for s, d in sources), default=0.0) for sources in table),
        rank=tuple(placement[section // SECTIONS_PER_STAGE] for section in range(len(table))),
        placed=stages_of(placement),
        hold=tuple(
            max(cost.saved_activations, weight) + more
            for cost, weight, more in zip(costs.stages, for_weight, handed, strict=True)
        ),
        hold_for_w=tuple(for_weight),
        joined=tuple(cost.saved_activations + more for cost, more in zip(costs.stages, handed, strict=True)),
        at_start=tuple(at_start),
        at_end=tuple(at_end),
        update=tuple(costs.update_seconds(rank, "post") if updates else 0.0 for rank in ranks),
        gathered=_gathered([each.gather for each in exchanged], placement),
        sum=tuple(seconds for each in exchanged for seconds in (0.0, 0.0, each.sum)),
    )


def joined_arrays(each: Sequence[ScheduleArrays]) -> ScheduleArrays:
    """The arrays of several microbatches with costs of their own, as of one microbatch that runs through the
    stages of all: stage s of microbatch j is the stage j · stages + s.

    each: of one microbatch, on the same placement.
    """
    first = each[0]

    def shifted(table: str) -> tuple[Needs, ...]:
        return tuple(
            tuple((section + k * first.sections, delay) for section, delay in row)
            for k, arrays in enumerate(each)
            for row in getattr(arrays, table)
        )

    placed = (
        tuple(k * first.stages + stage for k in range(len(each)) for stage in stages)
        for stages in first.placed
    )
    rows: dict[str, Any] = {
        name: tuple(x for arrays in each for x in getattr(arrays, name)) for name in _PER_SECTION
    }
    return replace(
        first,
        stages=first.stages * len(each),
        needs=shifted("needs"),
        feeds=shifted("feeds"),
        placed=tuple(placed),
        **rows,
    )


def _gathered(gathers: Sequence[float], placement: Sequence[int]) -> tuple[float, ...]:
    """The time at which the parameters of each section's stage are there.

    A rank gathers one stage after the other, in the order of their first F, which is that of the model.
    """
    now, ready = [0.0] * (max(placement) + 1), list[float]()
    for rank, seconds in zip(placement, gathers, strict=True):
        now[rank] += seconds
        ready += [now[rank] if seconds else 0.0] * SECTIONS_PER_STAGE
    return tuple(ready)


def _in_model_order(table: list[Needs], placement: tuple[int, ...]) -> tuple[Needs, ...]:
    """The needs, extended so that every rank runs a microbatch's F in stage order and its B in reverse.

    Without branches in the model this adds nothing.  With branches, the F of a later stage may not depend on
    that of an earlier stage; running ahead, it could take the memory that the earlier F needs, and block its
    own B.  The extension also bounds how long a rank holds values that its stages hand each other.
    """
    stages = range(len(placement))
    before: dict[int, set[int]] = {}  # per section, the sections that end before it starts
    last: dict[int, int] = {}  # per rank
    first = [SECTIONS_PER_STAGE * stage for stage in stages]
    for section in (*first, *(f + 1 for f in reversed(first))):
        rank = placement[section // SECTIONS_PER_STAGE]
        sources = [source for source, _ in table[section]]
        before[section] = set(sources).union(*(before.get(source, ()) for source in sources))
        if rank in last and last[rank] not in before[section]:
            table[section] = (*table[section], (last[rank], 0.0))
            before[section] |= {last[rank]} | before[last[rank]]
        last[rank] = section
    return tuple(table)


def _rows(name: str, table: Sequence[Needs], microbatches: int) -> dict[str, object]:
    """The begin of each section's row, and the concatenated rows."""
    rows = [(section, other, delay) for section, row in enumerate(table) for other, delay in row]
    return {
        f"{name}_at": np.cumsum([0, *map(len, table)]),
        f"{name}_step": np.array([(other - section) * microbatches for section, other, _ in rows], np.int64),
        f"{name}_delay": np.array([delay for _, _, delay in rows], np.float64),
    }


def least_period(arrays: ScheduleArrays, costs: Costs, limits: Sequence[float]) -> float:
    """No schedule's mean time from microbatch to microbatch is shorter.

    It is the work of the busiest rank; or the memory · seconds that a microbatch takes on a rank at
    least, by the rank's limit.  Raises ScheduleError if the sections need each other in a cycle.
    """
    areas = zip(_held_at_least(arrays, costs), limits, strict=True)
    return max([arrays.period, *(area / limit for area, limit in areas if area)])


def _held_at_least(arrays: ScheduleArrays, costs: Costs) -> list[float]:
    """The memory · seconds of one microbatch on each rank.  A value that is held from one section to another
    is held for at least the longest path between them.
    """
    seconds = np.array(arrays.seconds)
    # From the start of one section to that of another.
    way = np.full((arrays.sections, arrays.sections), -np.inf)
    for section in in_order(arrays.needs):
        way[section, section] = 0.0
        for source, delay in arrays.needs[section]:
            np.maximum(way[:, section], way[:, source] + seconds[source] + delay, out=way[:, section])
    areas = [0.0] * arrays.ranks
    for stage, cost in enumerate(costs.stages):
        f, b, w = (SECTIONS_PER_STAGE * stage + kind for kind in range(3))
        area = cost.saved_activations * (way[f, b] + seconds[b]) + cost.saved_for_weight * seconds[w]
        areas[arrays.rank[f]] += float(area)
    for edge in costs.edges:
        source, target = index(edge.source), index(edge.target)
        if arrays.rank[source] == arrays.rank[target] and edge.bytes:
            areas[arrays.rank[source]] += edge.bytes * max(0.0, float(way[source, target] - seconds[source]))
    return areas
