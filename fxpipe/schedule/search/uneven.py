"""The order of a step whose microbatches have costs of their own, as where their lengths differ.

Which microbatch comes when, and what each rank runs of it, is found together: list scheduling in simulated
time for an order of the microbatches and a timetable, of which climbs move one thing at a time.  Their
orders are annealed, op by op.  The work is a number, and no time, so that the same lengths always give
the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from fxpipe.errors import ScheduleError
from fxpipe.schedule.bound_of_each import lower_bound_of_each
from fxpipe.schedule.costs import Costs, StageCost
from fxpipe.schedule.dependencies import OFFSETS, SECTION_KINDS
from fxpipe.schedule.engine.annealing import anneal
from fxpipe.schedule.engine.arrays import ScheduleArrays, joined_arrays, schedule_arrays
from fxpipe.schedule.engine.order import Order, OrderTimes
from fxpipe.schedule.ops import Op, OpKind, RankOps
from fxpipe.schedule.search.due_dates import start_alone
from fxpipe.schedule.search.uneven_kernel import climb
from fxpipe.schedule.simulation.memory import rank_over
from fxpipe.schedule.simulation.timeline import for_each
from fxpipe.schedule.units import bytes_text

WORK, LOOKS_A_SECOND = 2_400_000, 4_800_000
"""Ops that the climbs look at, at most, and in about a second, with what follows."""
_LEAST = 60  # timetables, of steps with many ops
_CLIMBS, _ROUNDS = 4, 150  # at most so many climbs, each of at least so many timetables
_LOOKS = 4  # of annealing at ops, for each of the climbs'
_HOT, _COLD = 0.007, 0.05  # how much longer an order may be: at first, of its time; at last, of that


class TooLarge(ScheduleError):
    """A microbatch needs more memory for activations on a rank than its limit."""

    def __init__(self, microbatch: int, rank: int, needs: float, limit: float) -> None:
        self.needs = (
            f"alone needs {bytes_text(needs)} for activations on rank {rank}, and the limit is "
            f"{bytes_text(limit)}"
        )
        super().__init__(f"microbatch {microbatch} {self.needs}")
        self.microbatch, self.rank = microbatch, rank


@dataclass(frozen=True, eq=False)
class Uneven:
    """Microbatches with costs of their own on the stages of a placement.

    ``costs``: of each microbatch.  ``limits``: per rank the memory for activations, infinite for none.
    ``joined``: the stages that run B and W as one op.  ``in_order``: whether microbatches must come in
    theirs, as where they change buffers.  ``lookups``: the first stages that are shards of an embedding, one
    a rank.
    """

    costs: tuple[Costs, ...]
    placement: tuple[int, ...]
    limits: tuple[float, ...]
    joined: frozenset[int] = frozenset()
    in_order: bool = False
    lookups: int = 0

    @cached_property
    def of_ops(self) -> list[Costs]:
        """The costs of each microbatch, with those of joined stages in B; equal ones are one object."""
        return for_each(self.costs, self._with_joined)

    @cached_property
    def each(self) -> list[ScheduleArrays]:
        """The arrays of each microbatch alone; equal costs have one."""
        return for_each(self.of_ops, lambda costs: schedule_arrays(costs, self.placement, 1))

    @cached_property
    def arrays(self) -> ScheduleArrays:
        """The arrays of all microbatches, as of one that runs through the stages of all."""
        return joined_arrays(self.each)

    @cached_property
    def bound(self) -> float:
        """Seconds that no order beats that keeps the limits."""
        return lower_bound_of_each(self.of_ops, self.placement, self.limits)

    @cached_property
    def least(self) -> tuple[float, ...]:
        """The memory of each rank for any of the microbatches alone."""
        return tuple(map(max, zip(*(arrays.smallest_limits for arrays in self.each), strict=True)))

    def best(self, work: int = WORK, seed: int = 0) -> RankOps:
        """The ops of each rank in the fastest order that is found.

        Raises TooLarge for a microbatch that does not fit the limits alone, and ScheduleError where no order
        keeps them.
        """
        self._check_largest()
        rounds = max(_LEAST, work // self.arrays.sections)
        climbs = max(1, min(_CLIMBS, rounds // _ROUNDS))
        orders = list[Order]()
        for k in range(climbs):
            order = self._climbed(rounds // climbs, seed + k)
            if order is not None:
                orders.append(order)
                if _makespan(order) <= self._good:
                    break
        if not orders:
            raise ScheduleError("no order of these microbatches keeps the memory limit")
        if not self.in_order and _makespan(orders[-1]) > self._good:
            orders += [self._annealed(order, _LOOKS * work // len(orders), seed) for order in orders]
        return self._decoded(self._with_late_lookups(min(orders, key=_makespan)))

    @property
    def _good(self) -> float:
        """The makespan at which a search ends."""
        return self.bound * (1 + 1e-9)

    def _climbed(self, rounds: int, seed: int) -> Order | None:
        """The fastest order of so many timetables; None where none is possible."""
        best = np.empty(self.arrays.sections, np.int64)
        first, period = self.each[0], np.array([arrays.period for arrays in self.each])
        time = climb(
            self.arrays.tables._replace(placed_at=first.tables.placed_at, placed=first.tables.placed),
            first.stages,
            len(self.costs),
            np.concatenate([start_alone(arrays) for arrays in self.each]),
            period,
            self._starts(period),
            not self.in_order and len(self.costs) > 1,
            np.array(self.limits, np.float64),
            self._good,
            rounds,
            seed,
            best,
        )
        return None if time == inf else Order(self.arrays, best)

    def _annealed(self, order: Order, work: int, seed: int) -> Order:
        """The best order that annealing meets: microbatches may come in another one on each rank."""
        hot, tables = _HOT * _makespan(order), self.arrays.tables_between_stages
        limits, goal = np.array(self.limits, np.float64), (True, self._good)
        op_ids = anneal(tables, order.op_ids, 1, limits, *goal, work, seed, hot, _COLD * hot)
        return Order(self.arrays, op_ids)

    def _with_late_lookups(self, order: Order) -> np.ndarray:
        """The order in which no rank looks up words more than the longest microbatch's time before their sum
        is needed: in that time each rank can come to it.

        Nothing keeps a rank from looking up all at the start, and no limit counts what the ranks give to a
        sum before all have.
        """
        if not self.lookups:
            return order.op_ids
        arrays, stages = self.arrays, self.each[0].stages
        begin, is_lookup = _times(order).end - np.array(arrays.seconds), np.zeros(arrays.sections, bool)
        ahead = max(each.period for each in self.each)
        for m in range(len(self.costs)):
            first = 3 * stages * m
            for lookup in range(first, first + 3 * self.lookups, 3):
                users = [op for op, _ in arrays.feeds[lookup] if op >= first + 3 * self.lookups]
                # Its user begins later still: the ranks' orders cannot block each other.
                begin[lookup] = max(begin[lookup], begin[users].min(initial=inf) - ahead)
                is_lookup[lookup] = True
        moved = []
        for rank in range(arrays.ranks):
            ops = order.of_rank(rank)
            others = ops[~is_lookup[ops]]
            begin[others] = np.maximum.accumulate(begin[others])  # rounded, an op may begin before the last
            moved.append(ops[np.argsort(begin[ops], kind="stable")])
        return np.concatenate(moved)

    def _check_largest(self) -> None:
        """A rank that cannot hold a microbatch in all its stages could block itself."""
        rank = rank_over(self.least, self.limits)
        if rank is not None:
            needs, least = [arrays.smallest_limits[rank] for arrays in self.each], self.least[rank]
            raise TooLarge(needs.index(least), rank, least, self.limits[rank])

    def times(self, ops: RankOps) -> OrderTimes:
        """When the ops of an order end."""
        return _times(Order(self.arrays, self._encoded(ops)))

    def peaks(self, ops: RankOps) -> list[float]:
        """The most memory that activations take on each rank."""
        return Order(self.arrays, self._encoded(ops)).peaks()

    def _starts(self, period: np.ndarray) -> np.ndarray:
        """Orders of the microbatches: as given, the shortest first, the longest first, the longest amidst."""
        listed = np.arange(len(period))
        if self.in_order:
            return listed[None]
        rising = np.argsort(period, kind="stable")
        return np.stack([listed, rising, rising[::-1], np.concatenate([rising[::2], rising[1::2][::-1]])])

    def _with_joined(self, costs: Costs) -> Costs:
        """The costs of stages that run B and W as one op, with all of it in B."""

        def joined(cost: StageCost) -> StageCost:
            both = cost.backward + cost.weight
            return replace(cost, backward=both, weight=0.0, saved_for_weight=0.0)

        stages = tuple(joined(c) if s in self.joined else c for s, c in enumerate(costs.stages))
        return replace(costs, stages=stages) if self.joined else costs

    def _encoded(self, ops: RankOps) -> np.ndarray:
        stages = len(self.placement)
        return np.array(
            [
                3 * (op.microbatch * stages + op.stage) + section
                for rank_ops in ops
                for op in rank_ops
                for section in OFFSETS[op.kind]
            ],
            np.int64,
        )

    def _decoded(self, op_ids: np.ndarray) -> RankOps:
        stages, ranks = len(self.placement), self.each[0].ranks
        order: list[list[Op]] = [[] for _ in range(ranks)]
        for op_id in op_ids.tolist():
            at, section = divmod(op_id, 3)
            microbatch, stage = divmod(at, stages)
            kind = SECTION_KINDS[section]
            if stage in self.joined:
                # Its W takes no time, and comes when it may: both are the B's one op.
                if kind is OpKind.W:
                    continue
                kind = OpKind.BW if kind is OpKind.B else kind
            order[self.placement[stage]].append(Op(kind, stage, microbatch))
        return tuple(map(tuple, order))


def _times(order: Order) -> OrderTimes:
    done = order.run()
    assert done is not None, "an order that was built can progress"
    return done


def _makespan(order: Order) -> float:
    return _times(order).makespan
