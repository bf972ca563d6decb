"""Costs and placement as arrays, and orders as op ids: the data that the searches compute on.

Sections are numbered as in :mod:`fxpipe.schedule.dependencies`, 3·stage + 0, 1, 2 for F, B, W.  An *op id* is
the number of the op's value, section · microbatches + microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxpipe.schedule.costs import Costs
from fxpipe.schedule.dependencies import SECTION_KINDS, SECTIONS_PER_STAGE, Needs, durations, needs
from fxpipe.schedule.engine.kernel import Floats, Ints, Tables, peak_of, run_ops
from fxpipe.schedule.ops import Op, OpKind, Order, Phase
from fxpipe.schedule.placement import stages_of
from fxpipe.schedule.simulation.memory import memory_changes

OpIds = Ints
"""An order as op ids: the ops of rank 0 in order, then those of rank 1, …"""


@dataclass(frozen=True)
class ScheduleArrays:
    """Costs and placement as arrays.

    Per section: ``seconds`` to ``rank``, and the memory changes ``at_start`` and ``at_end``.  Per rank: its
    stages (``own``).  Per stage: ``hold`` and ``kept``, the most that a rank holds from F to B and from B to
    W, including values that the stage and later stages of its rank hand each other.
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
        """Seconds of one microbatch on a rank."""
        first = [SECTIONS_PER_STAGE * stage for stage in self.own[rank]]
        return sum(sum(self.seconds[s : s + SECTIONS_PER_STAGE]) for s in first)

    @cached_property
    def period(self) -> float:
        """The work of the busiest rank on one microbatch: a lower bound on a repeated block."""
        return max(self.work(rank) for rank in range(self.ranks))

    def tables(self, microbatches: int) -> Tables:
        """The arrays in the layout of the compiled loops."""
        if microbatches not in self._tables:
            section = np.repeat(np.arange(self.sections), microbatches)
            self._tables[microbatches] = self._some_tables._replace(section=section)
        return self._tables[microbatches]

    @cached_property
    def _tables(self) -> dict[int, Tables]:
        return {}

    @cached_property
    def _some_tables(self) -> Tables:
        own_at = np.cumsum([0, *map(len, self.own)])
        own = np.array([stage for stages in self.own for stage in stages])
        need_at, need, need_delay = _rows(self.needs)
        feed_at, feed, feed_delay = _rows(self.feeds)
        return Tables(
            section=np.empty(0, np.int64),
            seconds=np.array(self.seconds, np.float64),
            rank=np.array(self.rank),
            lead=np.array(self.lead, np.float64),
            at_start=np.array(self.at_start, np.float64),
            at_end=np.array(self.at_end, np.float64),
            hold=np.array(self.hold, np.float64),
            kept=np.array(self.kept, np.float64),
            need_at=need_at,
            need=need,
            need_delay=need_delay,
            feed_at=feed_at,
            feed=feed,
            feed_delay=feed_delay,
            own_at=own_at,
            own=own,
        )

    def ops_of(self, rank: int, op_ids: OpIds, microbatches: int) -> OpIds:
        """The op ids of one rank."""
        at = self._some_tables.own_at
        return op_ids[3 * microbatches * at[rank] : 3 * microbatches * at[rank + 1]]

    def smallest_limit(self, rank: int) -> float:
        """The memory with which a rank can always progress: one microbatch in all its stages."""
        return self._least[rank]

    @cached_property
    def _least(self) -> tuple[float, ...]:
        return tuple(sum(self.hold[stage] for stage in stages) for stages in self.own)


def schedule_arrays(costs: Costs, placement: tuple[int, ...]) -> ScheduleArrays:
    """The arrays of costs and placement.  Raises ScheduleError if the two do not agree."""
    stages, waits, lasts = range(len(placement)), needs(costs, placement), durations(costs)
    table = _in_model_order([waits[kind][stage] for stage in stages for kind in SECTION_KINDS], placement)
    seconds = tuple(lasts[kind][stage] for stage in stages for kind in SECTION_KINDS)
    feeds: list[list[tuple[int, float]]] = [[] for _ in table]
    for section, sources in enumerate(table):
        for source, delay in sources:
            feeds[source].append((section, delay))
    kept, handed = [cost.saved_for_weight for cost in costs.stages], [0.0 for _ in costs.stages]
    for edge in costs.edges:
        if placement[edge.source.stage] == placement[edge.target.stage]:
            # Of the two stages, the earlier one's F runs first and its B last.
            handed[min(edge.source.stage, edge.target.stage)] += edge.bytes
            if edge.target.phase is Phase.W:
                kept[edge.target.stage] += edge.bytes
    at_start, at_end = memory_changes(costs, placement)
    return ScheduleArrays(
        ranks=max(placement) + 1,
        stages=len(placement),
        seconds=seconds,
        needs=table,
        feeds=tuple(map(tuple, feeds)),
        lead=tuple(min((seconds[s] + d for s, d in sources), default=0.0) for sources in table),
        rank=tuple(placement[section // SECTIONS_PER_STAGE] for section in range(len(table))),
        own=stages_of(placement),
        hold=tuple(
            max(cost.saved_activations, own) + more
            for cost, own, more in zip(costs.stages, kept, handed, strict=True)
        ),
        kept=tuple(kept),
        at_start=tuple(at_start),
        at_end=tuple(at_end),
    )


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


def _rows(table: Sequence[Sequence[tuple[int, float]]]) -> tuple[Ints, Ints, Floats]:
    """The begin of each row, and the concatenated rows."""
    pairs = [pair for row in table for pair in row]
    at = np.cumsum([0, *map(len, table)])
    return (
        at,
        np.array([to for to, _ in pairs], np.int64),
        np.array([delay for _, delay in pairs], np.float64),
    )


def decode(arrays: ScheduleArrays, op_ids: OpIds, microbatches: int) -> Order:
    """Op ids to ops."""
    table = [
        Op(kind, stage, microbatch)
        for stage in range(arrays.stages)
        for kind in SECTION_KINDS
        for microbatch in range(microbatches)
    ]
    ranks = range(arrays.ranks)
    return tuple(tuple(table[op] for op in arrays.ops_of(rank, op_ids, microbatches)) for rank in ranks)


def encode(order: Order, microbatches: int) -> OpIds:
    """Ops to op ids; a BW becomes its B and its W."""
    m, op_ids = microbatches, list[int]()
    for ops in order:
        for op in ops:
            first = SECTIONS_PER_STAGE * op.stage
            match op.kind:
                case OpKind.F:
                    op_ids.append(first * m + op.microbatch)
                case OpKind.B:
                    op_ids.append((first + 1) * m + op.microbatch)
                case OpKind.W:
                    op_ids.append((first + 2) * m + op.microbatch)
                case OpKind.BW:
                    op_ids.append((first + 1) * m + op.microbatch)
                    op_ids.append((first + 2) * m + op.microbatch)
    return np.array(op_ids, np.int64)


@dataclass(frozen=True, slots=True)
class Run:
    """The times of an order.  Per op: ``end``, and ``cause``: the op whose end let it start, or -1.  Per
    rank: ``first``, the start of its first op, and ``free``, the end of its last."""

    first: Floats
    free: Floats
    end: Floats
    cause: Ints

    @property
    def span(self) -> float:
        return float((self.free - self.first).max())

    @property
    def makespan(self) -> float:
        return float(self.free.max())


def run(arrays: ScheduleArrays, op_ids: OpIds, microbatches: int) -> Run | None:
    """Run every op as early as its rank's order allows; None if the orders deadlock."""
    done = Run(
        np.zeros(arrays.ranks), np.zeros(arrays.ranks), np.full(len(op_ids), -1.0), np.full(len(op_ids), -1)
    )
    if run_ops(
        arrays.tables(microbatches), op_ids, microbatches, 0.0, done.end, done.cause, done.first, done.free
    ):
        return done
    return None


def peaks(arrays: ScheduleArrays, op_ids: OpIds, microbatches: int) -> list[float]:
    """Per rank the maximum live memory; it depends on the rank's own order alone."""
    parts = (arrays.ops_of(rank, op_ids, microbatches) for rank in range(arrays.ranks))
    return [peak_of(arrays.tables(microbatches), ops) for ops in parts]


def fits(arrays: ScheduleArrays, op_ids: OpIds, microbatches: int, limits: Sequence[float]) -> bool:
    """Whether all ranks are within their limits, up to rounding."""
    own = peaks(arrays, op_ids, microbatches)
    return all(peak <= limit * (1 + 1e-9) for peak, limit in zip(own, limits, strict=True))
