"""Inserts vocabulary stages into an order of the model's own stages (2411.05288).

Beside its stages of the model every rank has an output shard, its part of the output layer: F is pass S
(before the barrier), B the ops after the barrier, W pass T.  If the input embedding is sharded too, every
rank also has an embedding shard.  The model's schedule gives due dates; list scheduling under the memory
limits places the ops of the output shards and delays the backward to after the barrier.  Embedding shards are
short: they are inserted one period before their results are needed.  Annealing then improves the order of all
ops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np

from fxpipe.errors import ScheduleError
from fxpipe.schedule.candidate import Candidate
from fxpipe.schedule.engine.arrays import ScheduleArrays, schedule_arrays
from fxpipe.schedule.engine.dispatch import LOOKAHEADS, dispatch
from fxpipe.schedule.engine.order import Order
from fxpipe.schedule.engine.tables import Floats
from fxpipe.schedule.ops import Op, OpKind, RankOps
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.search.due_dates import start_alone
from fxpipe.schedule.search.pool import judged
from fxpipe.schedule.vocabulary_costs import some_stages

_DELAYS = (0.0, 1.0, 3.0)  # delays of T, in periods
_EMBEDDED = 2  # microbatches that an embedding shard may hold
_EQUAL = 0.005  # of two orders whose times differ by less, the one with the lower peak memory is better
_TRIES = 6  # with less memory for the stages beside embedding shards each time


def insertions(problem: Problem, family: str, order: Order) -> list[Candidate]:
    """Orders of all stages, for annealing: ``order``, of the model's own stages, with the ops of the
    vocabulary stages inserted.

    A rank holds at most ``vocabulary.barriers`` microbatches more of the model's stages than it does in
    ``order``, also if it has no limit: an order for each number of microbatches more.

    Raises ScheduleError if all break a limit.
    """
    # How long embedding shards hold their values follows from the order of the other stages: that order gets
    # less memory by the least that they have taken beyond the limits, and by more each time.
    # Offload brings an order below its limits afterwards.
    limits = left = problem.limits if problem.offload is None else (inf,) * problem.ranks
    for step in range(1, 1 + _TRIES):
        starts = _starts(problem, family, order, left)
        excess = [_excess(start.order, limits) for start in starts]
        within = [start for start, over in zip(starts, excess, strict=True) if not any(over)]
        if within:
            return within
        over = min(excess, key=max)
        left = tuple(limit - step * more * (1 + 1e-6) for limit, more in zip(left, over, strict=True))
    rank = max(range(len(over)), key=over.__getitem__)
    raise ScheduleError(
        f"schedule {family} with vocabulary stages needs "
        f"{problem.text.needs(limits[rank] + over[rank], rank, limits[rank])}"
    )


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """The best order of all stages: of those that are about as fast, the one with the lowest peak memory."""
    equal = (1 + _EQUAL) * min(one.seconds for one in candidates)
    return min((one for one in candidates if one.seconds <= equal), key=lambda one: one.peak)


def ops_of(candidate: Candidate) -> RankOps:
    """The ops of an order of all stages."""
    vocabulary = candidate.problem.vocabulary
    assert vocabulary is not None, "its stages are inserted"
    return fused(candidate.order.ops, vocabulary.embedding_shards)


def _excess(order: Order, limits: Sequence[float]) -> list[float]:
    """The memory by which the order breaks the limit of each rank."""
    return [max(0.0, peak - limit * (1 + 1e-9)) for peak, limit in zip(order.peaks(), limits, strict=True)]


def _starts(problem: Problem, family: str, order: Order, limits: Sequence[float]) -> list[Candidate]:
    vocabulary, arrays = problem.vocabulary, problem.arrays
    assert vocabulary is not None, "it has stages to insert"
    shards, costs = vocabulary.embedding_shards, problem.costs
    rest = some_stages(costs, shards, len(costs.stages))
    listed = schedule_arrays(rest, problem.placement[shards:], problem.microbatches)
    dates = _Dates(order, listed)
    embedded = [_EMBEDDED * hold for hold in arrays.hold[:shards]] or [0.0] * problem.ranks
    left = [limit - shard for limit, shard in zip(limits, embedded, strict=True)]
    barriers = vocabulary.barriers
    levels = [_caps(order, listed, barriers, n, left) for n in range(1 + barriers)]
    candidates = []
    for caps in dict.fromkeys(levels):
        start = _listed(problem, listed, dates, caps)
        if shards:
            start = _with_embedding_shards(arrays, start, shards)
        bounds = zip(caps, embedded, start.peaks(), strict=True)
        limited = problem.limited(tuple(max(cap + shard, peak) for cap, shard, peak in bounds))
        candidate = judged(limited, family, start)
        assert candidate is not None, "a start keeps its own limits"
        candidates.append(candidate)
    return candidates


def _listed(problem: Problem, arrays: ScheduleArrays, dates: _Dates, caps: Sequence[float]) -> Order:
    """The best order of list scheduling, without the embedding shards."""

    def value(order: Order) -> float:
        done = order.run()
        assert done is not None, "an order that was built by running it cannot block"
        return problem.value(done) if order.fits(caps) else inf

    ways = product(_DELAYS, LOOKAHEADS)
    return min((dispatch(arrays, dates.due(delay), caps, ahead) for delay, ahead in ways), key=value)


def _with_embedding_shards(arrays: ScheduleArrays, order: Order, embedding_shards: int) -> Order:
    """Insert each embedding shard one period before its result is needed, and its backward after its
    gradient arrives.  ``arrays``: of all stages; ``order``: without the embedding shards.

    When an inserted op starts, the ops that it depends on have ended and those that depend on it have not
    started, so the ranks' orders cannot block each other.
    """
    m, before, listed = arrays.microbatches, 3 * embedding_shards, order.arrays
    done = order.run()
    assert done is not None, "the order to put the embedding in can progress"
    end = done.end.reshape(-1, m)
    start = end - np.array(listed.seconds)[:, None]
    orders = []
    for rank, ops in enumerate(order.ops):
        f, b, w = range(3 * rank, 3 * rank + 3)
        users = [section - before for section, _ in arrays.feeds[f] if section >= before]
        makers = [
            section - before for section, _ in (*arrays.needs[b], *arrays.needs[w]) if section >= before
        ]
        needed_at = start[users].min(axis=0, initial=inf) - listed.period
        wanted = deque(np.minimum.accumulate(needed_at[::-1])[::-1])
        grads = deque(np.maximum.accumulate(end[makers].max(axis=0, initial=0.0)))
        starts = np.maximum.accumulate(start.ravel()[order.of_rank(rank)])
        merged: list[Op] = []
        for op, now in zip(ops, starts, strict=True):
            while wanted and wanted[0] <= now:
                wanted.popleft()
                merged.append(Op(OpKind.F, rank, m - 1 - len(wanted)))
            while grads and grads[0] < now:
                grads.popleft()
                merged.append(Op(OpKind.BW, rank, m - 1 - len(grads)))
            merged.append(replace(op, stage=op.stage + embedding_shards))
        merged += (Op(OpKind.F, rank, m - left) for left in range(len(wanted), 0, -1))
        merged += (Op(OpKind.BW, rank, m - left) for left in range(len(grads), 0, -1))
        orders.append(tuple(merged))
    return Order.of(arrays, tuple(orders))


def fused(ops: RankOps, embedding_shards: int) -> RankOps:
    """The order in which B and W of an embedding shard, of which W is empty, are one op."""

    def joined(op: Op) -> Op:
        return replace(op, kind=OpKind.BW) if op.kind is OpKind.B and op.stage < embedding_shards else op

    def has_code(op: Op) -> bool:
        return op.kind is not OpKind.W or op.stage >= embedding_shards

    return tuple(tuple(map(joined, filter(has_code, rank_ops))) for rank_ops in ops)


def _caps(
    order: Order, arrays: ScheduleArrays, barriers: int, more: int, limits: Sequence[float]
) -> tuple[float, ...]:
    """The memory limits of list scheduling: for so many microbatches ``more`` than in ``order``."""
    caps = []
    rows = zip(order.peaks(), order.arrays.smallest_limits, arrays.smallest_limits, limits, strict=True)
    for most, without, with_shards, limit in rows:
        beside = (1 + barriers) * (with_shards - without)
        caps.append(min(limit, max(most, without) + more * without + beside))
    return tuple(caps)


class _Dates:
    """Due dates of all ops but those of embedding shards, from the start times in an order of the model's own
    stages.  ``arrays``: of the stages that get due dates."""

    def __init__(self, order: Order, arrays: ScheduleArrays) -> None:
        done, model = order.run(), order.arrays
        assert done is not None, "the order to insert stages into can progress"
        start = done.end.reshape(-1, model.microbatches) - np.array(model.seconds)[:, None]
        scale = arrays.period / model.period if model.period else 1.0
        self.period, bottom = arrays.period, 3 * (model.stages - 1)  # the last F of the model
        alone, sections = start_alone(arrays), model.sections
        behind = alone[bottom + 1] - alone[bottom] - arrays.seconds[bottom]  # the barrier
        is_forward = np.arange(sections) % 3 == 0
        body = scale * start + np.where(is_forward, 0.0, behind)[:, None]
        shards = scale * start[bottom] + (alone[sections:] - alone[bottom])[:, None]
        self.dates, self.first_shard = np.concatenate([body, shards]), sections

    def due(self, delay: float) -> Floats:
        """Due dates with T delayed by so many periods."""
        dates = self.dates.copy()
        dates[self.first_shard + 2 :: 3] += delay * self.period
        flat: Floats = dates.ravel()
        return flat
