"""The rows of trained parameters that each process owns: it alone updates them (ZeRO, arXiv 1910.02054).

A bucket of gradients is divided where a row begins, so that a replica owns rows, with names of their own, as
a rank does of a vocabulary: ``"h.3.attn.weight[0:384]"``.  A parameter that is ``undivided`` is one row.
Of what lanes have alike each replica of each lane owns rows: first the lanes divide it, then the replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from fxpipe.plan.artifact import Plan, RankTensors, TensorLayout, holders
from fxpipe.plan.lanes import LaneGroup
from fxpipe.plan.rows import ShardName
from fxpipe.runtime.program.replicas import Division, Piece


def divisions(plan: Plan, tensors: RankTensors, replicas: int) -> list[Division]:
    """The divisions of a rank's buckets, by their numbers.

    Where a bucket has few parameters that are undivided, its shards differ in size: those of the next buckets
    make up for it, so that all owners have about as much.
    """
    shared = {n for n, ranks in holders(each.parameters for each in plan.tensors).items() if len(ranks) > 1}
    sizes: dict[LaneGroup, list[int]] = {}  # of what each owner has
    divided = []
    for bucket in tensors.exchanged:
        lanes = plan.lanes.dividing(bucket.gradients)
        before = sizes.setdefault(lanes, [0] * (replicas * lanes.number))
        # All ranks must divide a parameter alike that several have; it is alone in its bucket.
        evens_out = plan.undivided and shared.isdisjoint(bucket.gradients)
        others = before if evens_out else [0] * len(before)
        division = divide(bucket.gradients, plan.layouts, len(before), plan.undivided, others)
        for owner, (begin, end) in enumerate(pairwise(division.begins)):
            before[owner] += end - begin
        divided.append(replace(division, lanes=lanes))
    return divided


def divide(
    names: Sequence[ShardName],
    layouts: Mapping[str, TensorLayout],
    number: int,
    undivided: Collection[str] = (),
    owned: Sequence[int] = (),
) -> Division:
    """Cut a bucket of these gradients into as many shards, each of whole rows, or whole tensors.

    owned: the elements that each owner has of other buckets; with this one all have about as many.
    """
    sizes = {name: torch.Size(layouts[name].shape).numel() for name in names}
    numbers = {name: 1 if name.tensor in undivided else _rows(layouts[name]) for name in names}
    rows = {name: sizes[name] // numbers[name] for name in names if sizes[name]}  # elements of a row
    total = sum(sizes.values())
    even = (sum(owned) + total) / number
    # Behind equal shares no owner lacks anything of a bucket of empty tensors, and the sum would be zero.
    lacks = [max(0.0, even - own) for own in owned] if any(owned) and total else [1.0] * number
    begins = [0]
    for owner in range(1, number):
        begin, target = 0, int(total * sum(lacks[:owner]) / sum(lacks))
        for name in names:
            if begin + sizes[name] > target:
                begin += round((target - begin) / rows[name]) * rows[name]  # the row nearest to an even share
                break
            begin += sizes[name]
        begins.append(begin)
    begins.append(total)
    empty = [Piece(name, 0, 0) for name in names if not sizes[name]]  # which no span of elements has
    pieces = [(*_pieces(sizes, rows, *shard),) for shard in pairwise(begins)]
    return Division(tuple(begins), ((*empty, *pieces[0]), *pieces[1:]))


def _rows(layout: TensorLayout) -> int:
    """The number of rows that lie one behind the other in memory; 1 if they do not."""
    shape, stride = layout.shape, layout.stride
    apart = bool(shape) and all(stride[0] >= s for s, n in zip(stride, shape, strict=True) if n > 1)
    return shape[0] if apart and shape[0] else 1


def _pieces(
    sizes: Mapping[ShardName, int], rows: Mapping[ShardName, int], begin: int, end: int
) -> Iterator[Piece]:
    at = 0
    for name, size in sizes.items():
        low, high = max(at, begin), min(at + size, end)
        if low < high:
            first = name.begin + (low - at) // rows[name]
            part = ShardName.of_rows(name.tensor, first, first + (high - low) // rows[name])
            yield Piece(name if high - low == size else part, low, high)
        at += size


def owned(plan: Plan, replicas: int) -> tuple[RankTensors, ...]:
    """The names of the tensors that each process owns; of those that several own all have the same values.

    Without shards all replicas own all tensors of their ranks.
    """
    lanes = range(plan.lanes.number)
    if not are_divided(plan, replicas):
        return tuple(tensors for tensors in plan.tensors for _ in lanes) * replicas

    def of(replica: int, lane: int, tensors: RankTensors, divided: Sequence[Division]) -> RankTensors:
        def rows(divided: Sequence[Division]) -> tuple[ShardName, ...]:
            return tuple(piece.name for each in divided for piece in each.pieces[each.owner(replica, lane)])

        whole = set(tensors.parameters).difference(*(bucket.gradients for bucket in tensors.exchanged))
        number = len(tensors.buckets)
        trained = rows(divided[:number])
        parameters = (*sorted(whole), *trained, *rows(divided[number:]))
        return replace(tensors, parameters=parameters, gradients=trained, buckets=(), frozen=())

    of_ranks = [(tensors, divisions(plan, tensors, replicas)) for tensors in plan.tensors]
    return tuple(
        of(replica, lane, *each) for replica in range(replicas) for each in of_ranks for lane in lanes
    )


def summing_lanes(plan: Plan) -> list[LaneGroup]:
    """The groups of lanes over which gradients are summed, or rows of parameters gathered."""
    groups = {*plan.lanes.summed.values()}
    for tensors in plan.tensors if plan.shard else ():
        groups |= {plan.lanes.dividing(bucket.gradients) for bucket in tensors.exchanged}
    return sorted(group for group in groups if group.number > 1)


def are_divided(plan: Plan, replicas: int) -> bool:
    """Whether processes own rows of parameters."""
    buckets = (bucket.gradients for tensors in plan.tensors for bucket in tensors.exchanged)
    return bool(plan.shard) and (
        replicas > 1 or any(plan.lanes.dividing(names).number > 1 for names in buckets)
    )
