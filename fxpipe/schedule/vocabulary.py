"""Weaves vocabulary stages into a schedule of the model's own stages (2411.05288).

Beside its stages of the model every rank has an output shard, its part of the output layer: F is pass S
(before the barrier), B the ops after the barrier, W pass T.  If the input embedding is sharded too, every
rank also has an embedding shard.  The model's schedule gives due dates; list scheduling under the memory
limits places the ops of the output shards and delays the backward to after the barrier.  Embedding shards are
short: they are inserted afterwards, one period before their results are needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, product
from math import inf

from fxpipe.errors import ScheduleError
from fxpipe.ir.graph import Color, Phase
from fxpipe.schedule.arrays import OpIds, ScheduleArrays, decode, encode, fits, peaks, run, schedule_arrays
from fxpipe.schedule.costs import Costs, Edge, StageCost
from fxpipe.schedule.dependencies import index
from fxpipe.schedule.dispatch import dispatch
from fxpipe.schedule.goal import Goal, Objective
from fxpipe.schedule.ops import Op, OpKind, Order
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.search.due_dates import start_alone
from fxpipe.schedule.search.local_search import improve
from fxpipe.vocabulary.stages import Vocabulary

_LOOKAHEADS = ((0.0, 0.0, 0.0), (0.3, 0.3, 0.3), (1.0, 1.0, 0.5), (1.001, 0.3, 0.7))
_DELAYS = (0.0, 1.0, 3.0)  # delays of T, in periods
_WORK = 2_000_000  # ops that local search may look at
_TRIES = 4  # with less memory for the stages beside embedding shards each time


def model_stage_costs(costs: Costs, vocabulary: Vocabulary) -> Costs:
    """The costs of the model's own stages."""
    return _some(costs, vocabulary.embedding_shards, len(costs.stages) - vocabulary.output_shards)


def _some(costs: Costs, first: int, last: int) -> Costs:
    """The costs of the stages from ``first`` to before ``last``, renumbered from 0."""

    def moved(color: Color) -> Color:
        return Color(color.stage - first, color.phase)

    edges = tuple(
        replace(edge, source=moved(edge.source), target=moved(edge.target))
        for edge in costs.edges
        if first <= edge.source.stage < last and first <= edge.target.stage < last
    )
    return Costs(costs.stages[first:last], edges)


def budget_for_model_stages(
    costs: Costs, vocabulary: Vocabulary, limits: Sequence[float]
) -> tuple[float, ...]:
    """Per rank the memory left for the model's stages if the vocabulary stages hold one microbatch."""
    taken = [0.0] * len(limits)
    count = len(costs.stages)
    for stage in (*range(vocabulary.embedding_shards), *range(count - vocabulary.output_shards, count)):
        rank = stage if stage < vocabulary.embedding_shards else stage - (count - vocabulary.output_shards)
        taken[rank] += max(costs.stages[stage].saved_activations, costs.stages[stage].saved_for_weight)
    return tuple(limit - own for limit, own in zip(limits, taken, strict=True))


def weave(
    model: Problem,
    order: Order,
    costs: Costs,
    vocabulary: Vocabulary,
    limits: Sequence[float],
    objective: Objective = "span",
) -> Order:
    """The order of the model's stages with the ops of the vocabulary stages inserted.

    ``costs``: of all stages.  A rank holds at most ``vocabulary.barriers`` microbatches more of the model's
    stages than it does in ``order``, also if it has no limit.

    Raises ScheduleError if a limit is not kept.
    """
    m = model.microbatches
    whole = schedule_arrays(costs, vocabulary.placement(model.placement))
    # How long embedding shards hold their values follows from the order of the other stages: that order gets
    # as much less memory as they have taken beyond the limits.
    left = limits
    for _ in range(_TRIES):
        found = _woven(model, order, costs, vocabulary, left, objective)
        most = peaks(whole, encode(found, m), m)
        over = [max(0.0, peak - limit * (1 + 1e-9)) for peak, limit in zip(most, limits, strict=True)]
        if not any(over):
            return found
        left = [limit - excess * (1 + 1e-6) for limit, excess in zip(left, over, strict=True)]
    rank = max(range(len(over)), key=over.__getitem__)
    raise ScheduleError(
        f"schedule {model.name} with vocabulary stages needs {most[rank]:g} of memory on rank {rank}, and "
        f"the limit is {limits[rank]:g}"
    )


def _woven(
    model: Problem,
    order: Order,
    costs: Costs,
    vocabulary: Vocabulary,
    limits: Sequence[float],
    objective: Objective,
) -> Order:
    m = model.microbatches
    without = _some(costs, vocabulary.embedding_shards, len(costs.stages))
    arrays = schedule_arrays(without, replace(vocabulary, embedding_shards=0).placement(model.placement))
    goal = Goal(objective, m * arrays.period)
    op_ids = encode(order, m)
    dates = _Dates(model, op_ids, arrays, vocabulary.output_shards)
    if vocabulary.embedding_shards:
        held = schedule_arrays(costs, vocabulary.placement(model.placement)).hold
        limits = [limit - 2 * held[rank] for rank, limit in enumerate(limits)]
    caps = _caps(model, op_ids, arrays, vocabulary.barriers, limits)
    best: tuple[float, OpIds] | None = None
    for delay, lookahead in product(_DELAYS, _LOOKAHEADS):
        found = dispatch(arrays, m, dates.due(delay), caps, lookahead)
        done = run(arrays, found, m)
        assert done is not None, "an order that was built by running it cannot block"
        value = goal.value(done) if fits(arrays, found, m, caps) else inf
        if best is None or value < best[0]:
            best = value, found
    assert best is not None, "there is at least one way to weave"
    woven = improve(arrays, best[1], m, caps, goal, _WORK)
    if not vocabulary.embedding_shards:
        return decode(arrays, woven, m)
    return _with_embedding_shards(costs.edges, arrays, woven, m, vocabulary.embedding_shards)


def _with_embedding_shards(
    edges: Sequence[Edge], arrays: ScheduleArrays, op_ids: OpIds, microbatches: int, embedding_shards: int
) -> Order:
    """Insert each embedding shard one period before its result is needed, and its backward after its
    gradient arrives.

    When an inserted op starts, the ops that it depends on have started and those that depend on it have not,
    so the ranks' orders cannot block each other.
    """
    m = microbatches
    done = run(arrays, op_ids, m)
    assert done is not None, "the order to put the embedding in can progress"
    users = {index(e.target) - 3 * embedding_shards for e in edges if e.source.stage < embedding_shards}
    makers = {index(e.source) - 3 * embedding_shards for e in edges if e.target.stage < embedding_shards}
    first = [min((done.end[s * m + j] - arrays.seconds[s] for s in users), default=0.0) for j in range(m)]
    last = [max((done.end[s * m + j] for s in makers), default=inf) for j in range(m)]
    ahead = [time - arrays.period for time in [*accumulate(reversed(first), min)][::-1]]
    behind = [*accumulate(last, max)]
    orders = []
    for rank, ops in enumerate(decode(arrays, op_ids, m)):
        its = arrays.ops_of(rank, op_ids, m)
        starts = accumulate((done.end[value] - arrays.seconds[value // m] for value in its), max)
        wanted, given = deque(ahead), deque(behind)
        order: list[Op] = []
        for op, start in zip(ops, starts, strict=True):
            while wanted and wanted[0] <= start:
                wanted.popleft()
                order.append(Op(OpKind.F, rank, m - 1 - len(wanted)))
            while given and given[0] < start:
                given.popleft()
                order.append(Op(OpKind.BW, rank, m - 1 - len(given)))
            order.append(replace(op, stage=op.stage + embedding_shards))
        order += (Op(OpKind.F, rank, m - left) for left in range(len(wanted), 0, -1))
        order += (Op(OpKind.BW, rank, m - left) for left in range(len(given), 0, -1))
        orders.append(tuple(order))
    return tuple(orders)


def _caps(
    model: Problem, op_ids: OpIds, arrays: ScheduleArrays, barriers: int, limits: Sequence[float]
) -> list[float]:
    """The memory limit of each rank for list scheduling."""
    caps = []
    most = peaks(model.arrays, op_ids, model.microbatches)
    for rank, limit in enumerate(limits):
        own = model.arrays.smallest_limit(rank)
        beside = (1 + barriers) * (arrays.smallest_limit(rank) - own)
        caps.append(min(limit, most[rank] + barriers * own + beside))
    return caps


class _Dates:
    """Due dates of all ops, from the start times in the model's own schedule."""

    def __init__(self, model: Problem, op_ids: OpIds, arrays: ScheduleArrays, output_shards: int) -> None:
        self.microbatches, self.arrays, self.model = model.microbatches, arrays, model.arrays
        done = run(self.model, op_ids, model.microbatches)
        assert done is not None, "the order to weave into can progress"
        self.end = done.end
        self.scale = arrays.period / self.model.period if self.model.period else 1.0
        self.alone = start_alone(arrays)

    def due(self, delay: float) -> list[float]:
        """Due dates with T delayed by so many periods."""
        arrays, alone = self.arrays, self.alone
        bottom = 3 * (self.model.stages - 1)  # the last F of the model
        behind = alone[bottom + 1] - alone[bottom] - arrays.seconds[bottom]  # the barrier
        dates: list[float] = []
        for section in range(self.model.sections):
            dates += self._moved(section, behind if section % 3 else 0.0)
        for section in range(self.model.sections, arrays.sections):
            late = delay * arrays.period if section % 3 == 2 else 0.0
            dates += self._moved(bottom, alone[section] - alone[bottom] + late)
        return dates

    def _moved(self, section: int, by: float) -> list[float]:
        """The starts of one of the model's sections, scaled to the longer period, plus ``by``."""
        m, seconds = self.microbatches, self.model.seconds[section]
        return [self.scale * (self.end[section * m + j] - seconds) + by for j in range(m)]


def with_output_shards(
    costs: Costs, ranks: int, seconds: float, barriers: int, transfer: float, saved: float = 0.0
) -> Costs:
    """The costs of a model with a sharded output layer: every rank spends ``seconds`` per microbatch on it, a
    third each on the logits and the two gradients, and holds ``saved`` from pass S to pass T."""
    third, last = seconds / 3, len(costs.stages) - 1
    before = 2 * third if barriers == 1 else third
    head = StageCost(before, max(0.0, seconds - third - before), third, saved, saved)
    shards, edges = range(last + 1, last + 1 + ranks), list(costs.edges)
    for own in shards:
        edges.append(Edge(Color(last, Phase.F), Color(own, Phase.F), seconds=transfer))
        others = [Color(other, Phase.B) for other in shards if other != own]
        edges += [Edge(Color(own, Phase.F), other, seconds=transfer) for other in others]
        edges.append(Edge(Color(own, Phase.B), Color(last, Phase.B), seconds=transfer))
    return Costs((*costs.stages, *(head,) * ranks), tuple(edges))
