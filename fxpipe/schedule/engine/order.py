"""Orders as op ids, with the costs and the placement that they are run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fxpipe.schedule.dependencies import OFFSETS, SECTION_KINDS, SECTIONS_PER_STAGE
from fxpipe.schedule.engine.arrays import ScheduleArrays
from fxpipe.schedule.engine.kernel import run_ops
from fxpipe.schedule.engine.tables import Floats, Ints
from fxpipe.schedule.ops import Op, OpKind, RankOps
from fxpipe.schedule.simulation.memory import rank_over

OpIds = Ints
"""The ops of rank 0 in order, then those of rank 1, …; an op's id is section · microbatches + microbatch."""


@dataclass(frozen=True, slots=True)
class OrderTimes:
    """The times of an order.  Per op: ``end``, and ``cause``: the op whose end let it start, or -1.  Per
    rank: ``first``, the start of its first op less the update that is part of its span, and ``free``, the end
    of its last.  ``turn``: the ops of all ranks, each behind those that it waits for."""

    first: Floats
    free: Floats
    end: Floats
    cause: Ints
    turn: Ints

    @property
    def span(self) -> float:
        return float((self.free - self.first).max())

    @property
    def makespan(self) -> float:
        return float(self.free.max())


@dataclass(frozen=True, eq=False)
class Order:
    """The F, B and W of all ranks, in order, on the arrays of their costs and placement.

    ``joined``: the B that their rank runs together with their W, as one op.
    """

    arrays: ScheduleArrays
    op_ids: OpIds
    joined: OpIds = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def of(cls, arrays: ScheduleArrays, ops: RankOps) -> Order:
        """The order of these ops, with a BW as its B and its W; ``ops`` keeps it as BW."""
        m = arrays.microbatches
        joined = [
            (SECTIONS_PER_STAGE * op.stage + 1) * m + op.microbatch
            for rank_ops in ops
            for op in rank_ops
            if op.kind is OpKind.BW
        ]
        order = cls(arrays, encode(ops, m), np.array(joined, np.int64))
        order.__dict__["ops"] = ops
        return order

    @cached_property
    def ops(self) -> RankOps:
        arrays = self.arrays
        table = [
            Op(kind, stage, microbatch)
            for stage in range(arrays.stages)
            for kind in SECTION_KINDS
            for microbatch in range(arrays.microbatches)
        ]
        return tuple(tuple(table[op] for op in self.of_rank(rank)) for rank in range(arrays.ranks))

    def of_rank(self, rank: int) -> OpIds:
        """The op ids of one rank."""
        m, at = self.arrays.microbatches, self.arrays.tables.placed_at
        return self.op_ids[3 * m * at[rank] : 3 * m * at[rank + 1]]

    def run(self) -> OrderTimes | None:
        """Run every op as early as its rank's order allows; None if the ranks block each other."""
        ranks, ops, m = self.arrays.ranks, len(self.op_ids), self.arrays.microbatches
        first, free, end = np.zeros(ranks), np.zeros(ranks), np.full(ops, -1.0)
        cause, turn = np.full(ops, -1), np.full(ops, -1)
        ends = run_ops(self.arrays.tables, self.op_ids, m, 0.0, end, cause, first, free, turn)
        return OrderTimes(first, free, end, cause, turn) if ends else None

    def peaks(self) -> list[float]:
        """The maximum live memory of each rank; it depends on the rank's own order alone.

        Nothing is held between a B and a W that are one op.
        """
        tables, m = self.arrays.tables, self.arrays.microbatches
        peaks = []
        for rank in range(self.arrays.ranks):
            ops = self.of_rank(rank)
            sections = ops // m
            changes = np.stack([tables.at_start[sections], tables.at_end[sections]], axis=1)
            b = np.flatnonzero(np.isin(ops, self.joined))
            # One op: what both take is there from its start, and what both free goes at its end.
            changes[b, 0] += changes[b + 1, 0]
            changes[b + 1, 0] = 0.0
            changes[b + 1, 1] += changes[b, 1]
            changes[b, 1] = 0.0
            peaks.append(float(np.cumsum(changes).max(initial=0.0)))
        return peaks

    def fits(self, limits: Sequence[float]) -> bool:
        """Whether all ranks are within their limits, up to rounding."""
        return rank_over(self.peaks(), limits) is None


def encode(ops: RankOps, microbatches: int) -> OpIds:
    """Ops to op ids; a BW becomes its B and its W."""
    op_ids = [
        (SECTIONS_PER_STAGE * op.stage + offset) * microbatches + op.microbatch
        for rank_ops in ops
        for op in rank_ops
        for offset in OFFSETS[op.kind]
    ]
    return np.array(op_ids, np.int64)
