"""Which gradients are summed over the replicas together, and behind which op; and which frozen parameters are
gathered together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch

from fxpipe.codegen.signatures import Signature
from fxpipe.ir.graph import Kind, Section
from fxpipe.plan.artifact import Bucket, Plan, RankTensors, TensorLayout, holders
from fxpipe.plan.lanes import ONE_LANE, LaneGroup, LanePlan
from fxpipe.plan.rows import ShardName
from fxpipe.plan.step import Shard
from fxpipe.plan.tensors import dtype_of, gradient_dtype
from fxpipe.schedule.bucket_use import BucketUse, once
from fxpipe.schedule.bucket_use import per_use as for_each_use
from fxpipe.schedule.ops import PHASES, Color, Op, Schedule

#: A sum over replicas takes as much memory again as its bucket, and links are at their best from far less on.
MOST_BYTES = 64 << 20


def with_buckets(
    tensors: Sequence[RankTensors],
    sections: Sequence[Section],
    schedule: Schedule,
    layouts: Mapping[str, TensorLayout],
    grad_dtype: torch.dtype | None,
    *,
    shard: Shard,
    per_use: bool,
    lanes: LanePlan,
) -> tuple[RankTensors, ...]:
    """The tensors of the ranks with their buckets, in the order of the ops behind which these are summed.

    A gradient that several ranks make is alone in its bucket: its shards are then the same on all of them.
    So is a frozen parameter that several ranks use.  per_use: what is gathered for each use is in a bucket
    with what the same stages use.
    """
    accumulated = {s.color: [v.name for v in s.inputs if v.kind is Kind.GRADIENT] for s in sections}
    used = {s.color: [v.name for v in s.step_inputs if v.kind is Kind.PARAMETER] for s in sections}
    shared = {
        name
        for name, ranks in holders(rank_tensors.parameters for rank_tensors in tensors).items()
        if len(ranks) > 1
    }

    stages: dict[str, tuple[int, ...]] = {}
    for section in sections if per_use else ():
        for name in used[section.color]:
            stages[name] = tuple(sorted({*stages.get(name, ()), section.stage}))

    def dividing(name: str) -> LaneGroup:
        return lanes.dividing([ShardName(name)]) if shard else ONE_LANE

    def dtype(name: str) -> torch.dtype:
        return gradient_dtype(dtype_of(layouts[name].dtype), grad_dtype)

    def nbytes(name: str, is_frozen: bool) -> int:
        layout = layouts[name]
        return layout.nbytes if is_frozen else torch.Size(layout.shape).numel() * dtype(name).itemsize

    def buckets(
        ops: Sequence[Op], places: dict[str, int], last: dict[str, int], *, is_frozen: bool
    ) -> Iterator[Bucket]:
        """Make buckets of these names, in the order of places.  last: of each the op that ends its use."""
        first = _positions(ops[::-1], used)  # from the end

        def together(name: str) -> tuple[int, str, str, str, tuple[int, ...], LaneGroup, LaneGroup]:
            alone = name if name in shared else ""
            sums = None if is_frozen else lanes.sums(ShardName(name))
            of_lanes = sums or LaneGroup(0), dividing(name)
            of_gradient = "" if is_frozen else str(dtype(name))
            # The order first; then what cannot share memory, or is not exchanged with the same processes.
            return places[name], of_gradient, layouts[name].dtype, alone, stages.get(name, ()), *of_lanes

        for _, names in groupby(sorted(places, key=together), together):
            for members in _cut(names, partial(nbytes, is_frozen=is_frozen)):
                end = max(last[name] for name in members)
                before = max((first[name] for name in members if name in first), default=len(ops) - 1 - end)
                yield Bucket(str(ops[-1 - before]), str(ops[end]), tuple(map(ShardName, members)))

    def of_rank(rank_tensors: RankTensors, ops: Sequence[Op]) -> RankTensors:
        # Another rank makes what is not made here: a parameter that is used on this one alone.
        made = dict[str, int].fromkeys(rank_tensors.gradients, len(ops) - 1) | _positions(ops, accumulated)
        first, last = _positions(ops[::-1], used), _positions(ops, used)
        names = [name for name in rank_tensors.parameters if name in last] if shard == "parameters" else []
        # In the order of their first use, which ``first`` counts from the end.
        frozen: dict[str, int] = {n: -first[n] for n in names if n not in rank_tensors.gradients}
        return replace(
            rank_tensors,
            buckets=tuple(buckets(ops, made, made, is_frozen=False)),
            frozen=tuple(buckets(ops, frozen, last, is_frozen=True)),
        )

    return tuple(map(of_rank, tensors, schedule.order))


def bucket_uses(
    plan: Plan, calls: Sequence[Signature], schedule: Schedule, *, per_use: bool
) -> tuple[tuple[BucketUse, ...], ...]:
    """Per rank when its buckets are needed of other replicas, and summed: once a step, or for each use.

    calls: of all sections.  Those of frozen parameters are not summed.
    """
    used = {call.color: {*call.parameters, *call.behind_once} for call in calls}
    accumulated = {call.color: {*call.gradients} for call in calls}
    read_once = {name for call in calls for name in call.behind_once}

    def touches(names: Mapping[Color, set[str]], bucket: Bucket) -> Callable[[Op], bool]:
        colors = {color for color, members in names.items() if not members.isdisjoint(bucket.gradients)}
        return lambda op: any(Color(op.stage, phase) in colors for phase in PHASES[op.kind])

    def use_of(bucket: Bucket, ops: Sequence[Op], is_frozen: bool = False) -> BucketUse:
        adds, uses = touches(accumulated, bucket), touches(used, bucket)
        # Behind the last op where another rank makes the gradient.
        last = next(filter(uses if is_frozen else adds, reversed(ops)), ops[-1])
        of_lanes = None if is_frozen else plan.lanes.sums(bucket.gradients[0])
        if per_use and not read_once.isdisjoint(bucket.gradients):
            # At the start as well.
            use = for_each_use(ops, lambda op: op == ops[0] or uses(op), adds, last)
        elif per_use:
            use = for_each_use(ops, uses, adds, last)
        else:
            use = once(next(filter(uses, ops), last) if plan.shard else None, last)
        return use._replace(of_lanes=None if of_lanes is None else plan.lanes.arguments(of_lanes))

    return tuple(
        (
            *(use_of(bucket, ops) for bucket in tensors.buckets),
            *(use_of(bucket, ops, is_frozen=True)._replace(sums=()) for bucket in tensors.frozen),
        )
        for tensors, ops in zip(plan.tensors, schedule.order, strict=True)
    )


def _positions(ops: Sequence[Op], names: Mapping[Color, Sequence[str]]) -> dict[str, int]:
    """The position of the last of the ops whose sections have each name."""
    positions: dict[str, int] = {}
    for position, op in enumerate(ops):
        for phase in PHASES[op.kind]:
            positions |= dict.fromkeys(names.get(Color(op.stage, phase), ()), position)
    return positions


def _cut(names: Iterator[str], nbytes: Callable[[str], int]) -> Iterator[list[str]]:
    """The names in order, cut into lists of at most MOST_BYTES, or of one name."""
    members: list[str] = []
    total = 0
    for name in names:
        size = nbytes(name)
        if members and total + size > MOST_BYTES:
            yield members
            members, total = [], 0
        members.append(name)
        total += size
    yield members
