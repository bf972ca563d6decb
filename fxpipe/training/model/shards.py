"""The rows of trained parameters that each replica owns: it alone updates them (ZeRO, arXiv 1910.02054).

A bucket of gradients is divided where a row begins, so that a replica owns rows, with names of their own, as
a rank does of a vocabulary: ``"h.3.attn.weight[0:384]"``.  A parameter that is ``undivided`` is one row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from fxpipe.plan.artifact import Plan, RankTensors, TensorLayout, holders
from fxpipe.plan.rows import ShardName
from fxpipe.runtime.program.replicas import Piece


@dataclass(frozen=True)
class Division:
    """A bucket by replicas.  ``begins``: where their shards begin, and the end of the last.  ``pieces``: of
    each shard."""

    begins: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]


def divisions(plan: Plan, tensors: RankTensors, replicas: int) -> list[Division]:
    """The divisions of a rank's buckets, by their numbers.

    Where a bucket has few parameters that are undivided, its shards differ in size: those of the next buckets
    make up for it, so that all replicas own about as much.
    """
    if not plan.undivided:
        return [divide(bucket.gradients, plan.layouts, replicas) for bucket in tensors.exchanged]
    owned, found = [0] * replicas, []
    shared = {n for n, ranks in holders(each.parameters for each in plan.tensors).items() if len(ranks) > 1}
    for bucket in tensors.exchanged:
        # All ranks must divide a parameter alike that several have; it is alone in its bucket.
        others = owned if shared.isdisjoint(bucket.gradients) else ()
        division = divide(bucket.gradients, plan.layouts, replicas, plan.undivided, others)
        owned = [
            own + end - begin for own, (begin, end) in zip(owned, pairwise(division.begins), strict=True)
        ]
        found.append(division)
    return found


def divide(
    names: Sequence[ShardName],
    layouts: Mapping[str, TensorLayout],
    replicas: int,
    undivided: Collection[str] = (),
    owned: Sequence[int] = (),
) -> Division:
    """Cut a bucket of these gradients into shards, each of whole rows, or whole tensors.

    owned: the elements that each replica owns of other buckets; with this one all have about as many.
    """
    sizes = {name: torch.Size(layouts[name].shape).numel() for name in names}
    numbers = {name: 1 if name.tensor in undivided else _rows(layouts[name]) for name in names}
    rows = {name: sizes[name] // numbers[name] for name in names if sizes[name]}  # elements of a row
    total = sum(sizes.values())
    even = (sum(owned) + total) / replicas
    lacks = [max(0.0, even - own) for own in owned] if any(owned) else [1.0] * replicas
    begins = [0]
    for replica in range(1, replicas):
        begin, target = 0, int(total * sum(lacks[:replica]) / sum(lacks))
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
    if not plan.shard or replicas == 1:
        return plan.tensors * replicas

    def of(replica: int, tensors: RankTensors, divided: Sequence[Division]) -> RankTensors:
        def rows(divided: Sequence[Division]) -> tuple[ShardName, ...]:
            return tuple(piece.name for each in divided for piece in each.pieces[replica])

        whole = set(tensors.parameters).difference(*(bucket.gradients for bucket in tensors.exchanged))
        number = len(tensors.buckets)
        trained = rows(divided[:number])
        parameters = (*sorted(whole), *trained, *rows(divided[number:]))
        return replace(tensors, parameters=parameters, gradients=trained, buckets=(), frozen=())

    of_ranks = [(tensors, divisions(plan, tensors, replicas)) for tensors in plan.tensors]
    return tuple(of(replica, *each) for replica in range(replicas) for each in of_ranks)
