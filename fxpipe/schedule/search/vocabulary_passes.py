"""Weaves vocabulary stages into a schedule of the model's own stages (2411.05288).

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
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.engine.arrays import (
    OpIds,
    ScheduleArrays,
    decode,
    encode,
    fits,
    peaks,
    run,
    schedule_arrays,
)
from fxpipe.schedule.engine.dispatch import dispatch
from fxpipe.schedule.engine.kernel import Floats
from fxpipe.schedule.ops import Op, OpKind, Order
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.search.due_dates import start_alone
from fxpipe.schedule.search.goal import Goal, Objective
from fxpipe.schedule.search.pool import Task, anneal_each
from fxpipe.schedule.stages import Vocabulary
from fxpipe.schedule.vocabulary_costs import some_stages

_LOOKAHEADS = ((0.0, 0.0, 0.0), (0.3, 0.3, 0.3), (1.0, 1.0, 0.5), (1.001, 0.3, 0.7))
_DELAYS = (0.0, 1.0, 3.0)  # delays of T, in periods
_EMBEDDED = 2  # microbatches that an embedding shard may hold
_EQUAL = 0.005  # of two orders whose times differ by less, the one with the lower peak memory is better
_TRIES = 6  # with less memory for the stages beside embedding shards each time


def weave(
    model: Problem,
    order: Order,
    costs: Costs,
    vocabulary: Vocabulary,
    limits: Sequence[float],
    objective: Objective = "span",
) -> Order:
    """The order of the model's stages with the ops of the vocabulary stages inserted, and annealed.

    ``costs``: of all stages.  A rank holds at most ``vocabulary.barriers`` microbatches more of the model's
    stages than it does in ``order``, also if it has no limit; fewer if they make the step no shorter.

    Raises ScheduleError if a limit is not kept.
    """
    tasks = weavings(model, order, costs, vocabulary, limits, objective)
    anneal_each(tasks)
    return woven(tasks, vocabulary)


def weavings(
    model: Problem,
    order: Order,
    costs: Costs,
    vocabulary: Vocabulary,
    limits: Sequence[float],
    objective: Objective,
) -> list[Task]:
    """The orders that ``weave`` anneals: one for each number of microbatches more.

    Raises ScheduleError if all break a limit.
    """
    # How long embedding shards hold their values follows from the order of the other stages: that order gets
    # less memory by the least that they have taken beyond the limits, and by more each time.
    left = limits
    for step in range(1, 1 + _TRIES):
        tasks = _starts(model, order, costs, vocabulary, left, objective)
        excess = [_excess(task, limits) for task in tasks]
        within = [task for task, over in zip(tasks, excess, strict=True) if not any(over)]
        if within:
            return within
        over = min(excess, key=max)
        left = [limit - step * more * (1 + 1e-6) for limit, more in zip(left, over, strict=True)]
    rank = max(range(len(over)), key=over.__getitem__)
    raise ScheduleError(
        f"schedule {model.name} with vocabulary stages needs {limits[rank] + over[rank]:g} of memory on rank "
        f"{rank}, and the limit is {limits[rank]:g}"
    )


def woven(tasks: Sequence[Task], vocabulary: Vocabulary) -> Order:
    """The best order of the tasks: of those that are about as fast, the one with the lowest peak memory."""
    best = [task.best for task in tasks if task.best]
    equal = (1 + _EQUAL) * min(found.seconds for found in best)
    found = min((found for found in best if found.seconds <= equal), key=lambda found: found.peak)
    order = decode(found.task.arrays, found.order, found.task.microbatches)
    return _fused(order, vocabulary.embedding_shards)


def _excess(task: Task, limits: Sequence[float]) -> list[float]:
    """Per rank by how much the task's order breaks the limit."""
    assert task.best is not None, "a start keeps its own limits"
    most = peaks(task.arrays, task.best.order, task.microbatches)
    return [max(0.0, peak - limit * (1 + 1e-9)) for peak, limit in zip(most, limits, strict=True)]


def _starts(
    model: Problem,
    order: Order,
    costs: Costs,
    vocabulary: Vocabulary,
    limits: Sequence[float],
    objective: Objective,
) -> list[Task]:
    m, shards, op_ids = model.microbatches, vocabulary.embedding_shards, encode(order, model.microbatches)
    placement = vocabulary.placement(model.placement)
    arrays = schedule_arrays(costs, placement)
    listed = schedule_arrays(some_stages(costs, shards, len(costs.stages)), placement[shards:])
    goal, dates = Goal.of(objective, costs, placement, m, arrays), _Dates(model, op_ids, listed)
    embedded = [_EMBEDDED * hold for hold in arrays.hold[:shards]] or [0.0] * model.ranks
    left = [limit - own for limit, own in zip(limits, embedded, strict=True)]
    levels = [
        _caps(model, op_ids, listed, vocabulary.barriers, n, left) for n in range(1 + vocabulary.barriers)
    ]
    tasks = []
    for caps in dict.fromkeys(levels):
        start = _listed(listed, m, dates, caps, goal)
        if shards:
            start = encode(_with_embedding_shards(arrays, listed, start, m, shards), m)
        bounds = zip(caps, embedded, peaks(arrays, start, m), strict=True)
        task = Task(arrays, m, [max(cap + own, peak) for cap, own, peak in bounds], goal)
        task.keep([task.judge(start)])
        tasks.append(task)
    return tasks


def _listed(
    arrays: ScheduleArrays, microbatches: int, dates: _Dates, caps: Sequence[float], goal: Goal
) -> OpIds:
    """The best order of list scheduling, without the embedding shards."""
    best: tuple[float, OpIds] | None = None
    for delay, lookahead in product(_DELAYS, _LOOKAHEADS):
        op_ids = dispatch(arrays, microbatches, dates.due(delay), caps, lookahead)
        done = run(arrays, op_ids, microbatches)
        assert done is not None, "an order that was built by running it cannot block"
        value = goal.value(done) if fits(arrays, op_ids, microbatches, caps) else inf
        if best is None or value < best[0]:
            best = value, op_ids
    assert best is not None, "there is at least one way to list the ops"
    return best[1]


def _with_embedding_shards(
    arrays: ScheduleArrays, listed: ScheduleArrays, op_ids: OpIds, microbatches: int, embedding_shards: int
) -> Order:
    """Insert each embedding shard one period before its result is needed, and its backward after its
    gradient arrives.  ``listed``: the arrays of ``op_ids``, which are without the embedding shards.

    When an inserted op starts, the ops that it depends on have ended and those that depend on it have not
    started, so the ranks' orders cannot block each other.
    """
    m, before = microbatches, 3 * embedding_shards
    done = run(listed, op_ids, m)
    assert done is not None, "the order to put the embedding in can progress"
    end = done.end.reshape(-1, m)
    start = end - np.array(listed.seconds)[:, None]
    orders = []
    for rank, ops in enumerate(decode(listed, op_ids, m)):
        f, b, w = range(3 * rank, 3 * rank + 3)
        users = [section - before for section, _ in arrays.feeds[f] if section >= before]
        makers = [
            section - before for section, _ in (*arrays.needs[b], *arrays.needs[w]) if section >= before
        ]
        needed = start[users].min(axis=0, initial=inf) - listed.period
        wanted = deque(np.minimum.accumulate(needed[::-1])[::-1])
        given = deque(np.maximum.accumulate(end[makers].max(axis=0, initial=0.0)))
        starts = np.maximum.accumulate(start.ravel()[listed.ops_of(rank, op_ids, m)])
        order: list[Op] = []
        for op, now in zip(ops, starts, strict=True):
            while wanted and wanted[0] <= now:
                wanted.popleft()
                order.append(Op(OpKind.F, rank, m - 1 - len(wanted)))
            while given and given[0] < now:
                given.popleft()
                order.append(Op(OpKind.BW, rank, m - 1 - len(given)))
            order.append(replace(op, stage=op.stage + embedding_shards))
        order += (Op(OpKind.F, rank, m - left) for left in range(len(wanted), 0, -1))
        order += (Op(OpKind.BW, rank, m - left) for left in range(len(given), 0, -1))
        orders.append(tuple(order))
    return tuple(orders)


def _fused(order: Order, embedding_shards: int) -> Order:
    """The order in which an embedding shard's B and W are one op where W follows at once: its B is empty."""
    orders = []
    for ops in order:
        fused: list[Op] = []
        for op in ops:
            if op.stage < embedding_shards and fused and fused[-1] == replace(op, kind=OpKind.B):
                fused[-1] = replace(op, kind=OpKind.BW)
            else:
                fused.append(op)
        orders.append(tuple(fused))
    return tuple(orders)


def _caps(
    model: Problem,
    op_ids: OpIds,
    arrays: ScheduleArrays,
    barriers: int,
    more: int,
    limits: Sequence[float],
) -> tuple[float, ...]:
    """Per rank the memory limit of list scheduling: so many microbatches ``more`` than in ``op_ids``."""
    caps = []
    for rank, most in enumerate(peaks(model.arrays, op_ids, model.microbatches)):
        own = model.arrays.smallest_limit(rank)
        beside = (1 + barriers) * (arrays.smallest_limit(rank) - own)
        caps.append(min(limits[rank], max(most, own) + more * own + beside))
    return tuple(caps)


class _Dates:
    """Due dates of all ops, from the start times in the model's own schedule."""

    def __init__(self, model: Problem, op_ids: OpIds, arrays: ScheduleArrays) -> None:
        done = run(model.arrays, op_ids, model.microbatches)
        assert done is not None, "the order to weave into can progress"
        start = done.end.reshape(-1, model.microbatches) - np.array(model.arrays.seconds)[:, None]
        scale = arrays.period / model.arrays.period if model.arrays.period else 1.0
        self.period, bottom = arrays.period, 3 * (model.arrays.stages - 1)  # the last F of the model
        alone, own = start_alone(arrays), model.arrays.sections
        behind = alone[bottom + 1] - alone[bottom] - arrays.seconds[bottom]  # the barrier
        is_forward = np.arange(own) % 3 == 0
        body = scale * start + np.where(is_forward, 0.0, behind)[:, None]
        shards = scale * start[bottom] + (alone[own:] - alone[bottom])[:, None]
        self.dates, self.first_shard = np.concatenate([body, shards]), own

    def due(self, delay: float) -> Floats:
        """Due dates with T delayed by so many periods."""
        dates = self.dates.copy()
        dates[self.first_shard + 2 :: 3] += delay * self.period
        flat: Floats = dates.ravel()
        return flat
