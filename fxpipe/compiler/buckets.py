"""Which gradients are summed over the replicas together, and behind which op; and which frozen parameters are
gathered together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from fxpipe.ir.graph import Kind, Section
from fxpipe.plan.artifact import Bucket, Plan, RankTensors, TensorLayout, holders
from fxpipe.plan.rows import ShardName
from fxpipe.plan.tensors import dtype_of, gradient_dtype
from fxpipe.schedule.bucket_use import BucketUse, once
from fxpipe.schedule.bucket_use import per_use as for_each_use
from fxpipe.schedule.ops import PHASES, Color, Op, Schedule, parse_op

#: A sum over replicas takes as much memory again as its bucket, and links are at their best from far less on.
MOST_BYTES = 64 << 20


def with_buckets(
    tensors: Sequence[RankTensors],
    sections: Sequence[Section],
    schedule: Schedule,
    layouts: Mapping[str, TensorLayout],
    grad_dtype: torch.dtype | None,
    *,
    divides_frozen: bool,
) -> tuple[RankTensors, ...]:
    """The tensors of the ranks with their buckets, in the order of the ops behind which these are summed.

    A gradient that several ranks make is alone in its bucket: its shards are then the same on all of them.
    So is a frozen parameter that several ranks use.
    """
    made = {s.color: [v.name for v in s.inputs if v.kind is Kind.GRADIENT] for s in sections}
    used = {s.color: [v.name for v in s.step_inputs if v.kind is Kind.PARAMETER] for s in sections}
    shared = {name for name, ranks in holders(held.parameters for held in tensors).items() if len(ranks) > 1}

    def dtype(name: str) -> torch.dtype:
        return gradient_dtype(dtype_of(layouts[name].dtype), grad_dtype)

    def nbytes(name: str) -> int:
        return torch.Size(layouts[name].shape).numel() * dtype(name).itemsize

    def buckets(held: RankTensors, ops: Sequence[Op]) -> Iterator[Bucket]:
        # Another rank makes what is not made here: a parameter that is used on this one alone.
        last = dict.fromkeys(held.gradients, len(ops) - 1) | _positions(ops, made)
        first = _positions(ops[::-1], used)  # from the end

        def together(name: str) -> tuple[int, str, str, str]:
            return last[name], str(dtype(name)), layouts[name].dtype, name if name in shared else ""

        for (position, *_), names in groupby(sorted(last, key=together), together):
            for own in _cut(names, nbytes):
                before = max((first[name] for name in own if name in first), default=len(ops) - 1 - position)
                yield Bucket(str(ops[-1 - before]), str(ops[position]), tuple(map(ShardName, own)))

    def frozen(held: RankTensors, ops: Sequence[Op]) -> Iterator[Bucket]:
        first, last = _positions(ops[::-1], used), _positions(ops, used)
        wanted = (name for name in held.parameters if name in last and name not in held.gradients)

        def together(name: str) -> tuple[int, str, str]:
            return -first[name], layouts[name].dtype, name if name in shared else ""

        for (before, *_), names in groupby(sorted(wanted, key=together), together):
            for own in _cut(names, lambda name: layouts[name].nbytes):
                end = max(last[name] for name in own)
                yield Bucket(str(ops[before - 1]), str(ops[end]), tuple(map(ShardName, own)))

    return tuple(
        replace(
            held,
            buckets=tuple(buckets(held, ops)),
            frozen=tuple(frozen(held, ops)) if divides_frozen else (),
        )
        for held, ops in zip(tensors, schedule.order, strict=True)
    )


def bucket_uses(
    plan: Plan, sections: Sequence[Section], schedule: Schedule, *, per_use: bool
) -> tuple[tuple[BucketUse, ...], ...]:
    """Per rank when its buckets are needed of other replicas, and summed: once a step, or for each use.

    Those of frozen parameters are not summed.
    """
    found = _uses_once(plan) if not per_use else _uses_each(plan, sections, schedule)
    return tuple(
        tuple(use if k < len(held.buckets) else use._replace(sums=()) for k, use in enumerate(uses))
        for held, uses in zip(plan.tensors, found, strict=True)
    )


def _uses_once(plan: Plan) -> Iterator[list[BucketUse]]:
    for held in plan.tensors:
        ends = [(parse_op(bucket.before), parse_op(bucket.after)) for bucket in held.exchanged]
        yield [once(before if plan.shard else None, after) for before, after in ends]


def _uses_each(plan: Plan, sections: Sequence[Section], schedule: Schedule) -> Iterator[list[BucketUse]]:
    used = {s.color: {v.name for v in s.step_inputs if v.kind is Kind.PARAMETER} for s in sections}
    made = {s.color: {v.name for v in s.inputs if v.kind is Kind.GRADIENT} for s in sections}

    def touches(names: Mapping[Color, set[str]], bucket: Bucket) -> Callable[[Op], bool]:
        colors = {color for color, own in names.items() if not own.isdisjoint(bucket.gradients)}
        return lambda op: any(Color(op.stage, phase) in colors for phase in PHASES[op.kind])

    for held, ops in zip(plan.tensors, schedule.order, strict=True):
        yield [
            for_each_use(ops, touches(used, bucket), touches(made, bucket), parse_op(bucket.after))
            for bucket in held.exchanged
        ]


def _positions(ops: Sequence[Op], names: Mapping[Color, Sequence[str]]) -> dict[str, int]:
    """The position of the last of the ops whose sections have each name."""
    found: dict[str, int] = {}
    for position, op in enumerate(ops):
        for phase in PHASES[op.kind]:
            found |= dict.fromkeys(names.get(Color(op.stage, phase), ()), position)
    return found


def _cut(names: Iterator[str], nbytes: Callable[[str], int]) -> Iterator[list[str]]:
    """The names in order, cut into lists of at most MOST_BYTES, or of one name."""
    found: list[str] = []
    total = 0
    for name in names:
        own = nbytes(name)
        if found and total + own > MOST_BYTES:
            yield found
            found, total = [], 0
        found.append(name)
        total += own
    yield found
