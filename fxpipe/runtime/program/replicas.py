"""The same rank of all replicas of a pipeline: sums of gradients over them, and gathers of their shards.

A *bucket* is the memory of several gradients, or parameters, one behind the other.  Each replica owns a slice
of it, its *shard*: it gets that slice of all replicas, and adds them up in the replicas' order.  So all of
them have the same bits, and the work is spread over them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from fxpipe.plan.rows import ShardName
from fxpipe.plan.step import Shard
from fxpipe.plan.tensors import accum_dtype
from fxpipe.runtime.program.comm import Exchange, in_memory_order


class Piece(NamedTuple):
    """Rows of a parameter in a bucket.  ``name``: of the rows; that of the parameter, if they are all of it.
    ``begin``, ``end``: of its elements in the bucket."""

    name: ShardName
    begin: int
    end: int


@dataclass(eq=False)
class Bucket:
    """A bucket of a plan in this process: its memory, its division by the replicas, and its use.

    ``flat``: the memory of its gradients.  ``begins``: where the shards begin, and the end of the last.
    None for memory that is made when it is needed, of ``dtype`` on ``device``.  ``layouts``: the shapes and
    strides of the gradients, and of their parameters.  ``is_frozen``: whether it has parameters alone.

    ``level``: what replicas divide between them.  ``pieces``: the rows that this replica owns, in its shard.
    ``parameters``: those of the gradients, where each replica has all of them and has updated rows alone.
    ``owned``: else the rows that this replica has, of ``parameter_dtype``, one for each piece.
    ``summed``: the gradients that this replica has after the sum.
    """

    names: tuple[ShardName, ...]
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    dtype: torch.dtype
    device: torch.device
    flat: torch.Tensor | None
    begins: tuple[int, ...]
    level: Shard = ""
    is_frozen: bool = False
    pieces: tuple[Piece, ...] = ()
    parameters: tuple[torch.Tensor, ...] = ()
    owned: tuple[torch.Tensor, ...] = ()
    parameter_dtype: torch.dtype | None = None
    summed: torch.Tensor | None = None

    @property
    def whole(self) -> torch.Tensor:
        """The accumulators' memory; zeros, where nothing was added yet."""
        if self.flat is None:
            self.flat = torch.zeros(self.begins[-1], dtype=self.dtype, device=self.device)
        return self.flat

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gradients, or parameters, in a bucket's memory."""
        tensors, begin = dict[str, torch.Tensor](), flat.storage_offset()
        for name, (shape, stride) in zip(self.names, self.layouts, strict=True):
            tensors[name] = flat.as_strided(shape, stride, begin)
            begin += math.prod(shape)
        return tensors

    def own_rows(self) -> torch.Tensor:
        """New memory for all parameters, with the rows that this replica has."""
        flat = torch.empty(self.begins[-1], dtype=self.parameter_dtype, device=self.device)
        for piece, rows in zip(self.pieces, self.owned, strict=True):
            flat[piece.begin : piece.end].copy_(in_memory_order(rows).view(-1))
        return flat

    def begin_sum(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory that replica ``index`` gives to the sum, and that for what it gets.

        Without accumulators between steps, only the sum keeps them from now on.
        """
        whole = self.whole
        shard = shard_of(whole, self.begins, index)
        if self.level in ("", "optimizer"):
            self.summed = shard if self.level else whole
            return whole, self.summed
        self.flat = None  # the sum alone keeps it, until it is over
        if self.summed is None:
            self.summed = torch.zeros_like(shard)
        return whole, self.summed

    def take_sum(self, other: Bucket) -> None:
        """Have the sum that a copy of this bucket has now.

        The memory of gradients that no step keeps is written to again, where a captured one runs.
        """
        self.summed = other.summed
        if other.flat is None and other.summed is not None:
            self.summed = other.summed.clone()


class Accumulators(dict[str, torch.Tensor]):
    """The accumulators of a program in buckets, each of which is made when an op first adds to it."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        super().__init__()
        self._buckets: dict[str, Bucket] = {name: bucket for bucket in buckets for name in bucket.names}

    def __missing__(self, name: str) -> torch.Tensor:
        bucket = self._buckets[name]
        self.update(bucket.views(bucket.whole))
        return self[name]


class Replicas(Protocol):
    """The replicas of a rank, for one of them.  ``index``: of this replica.  ``number``: of all.  All
    replicas call the same, in the same order."""

    @property
    def index(self) -> int: ...

    @property
    def number(self) -> int: ...

    def reduce(self, bucket: torch.Tensor, begins: Sequence[int], into: torch.Tensor, *, mean: bool) -> Any:
        """Start to sum a bucket over all replicas, or to take its mean.

        begins: where the shards begin, and the end of the last.  into: the bucket itself, to have that of
        all; or its shard of this replica; or other memory, to which that is added: then the caller gives the
        bucket's memory up.
        Returns the handle for ``wait``.
        """
        ...

    def wait(self, work: Any) -> None:
        """Wait until a sum, or a gather, is over."""
        ...

    def copy_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors with their values on replica 0."""
        ...


class Shards(Replicas, Protocol):
    """Replicas that own rows of parameters."""

    def gather(self, tensors: Sequence[torch.Tensor], begins: Sequence[int]) -> Any:
        """Start to give all replicas the shards of all, in a bucket, or in dense tensors that make one."""
        ...


def add_shard(
    bucket: torch.Tensor,
    begins: Sequence[int],
    index: int,
    exchange: Exchange,
    into: torch.Tensor,
    *,
    mean: bool,
) -> torch.Tensor:
    """Sum a shard of a bucket over all replicas, or take its mean.  into: memory for it.

    Returns the memory of those of all replicas, which is free now.
    """
    number = len(begins) - 1
    sizes = [end - begin for begin, end in pairwise(begins)]
    slices = bucket.new_empty(number * sizes[index])
    exchange(slices, bucket, [sizes[index]] * number, sizes)
    first, *others = slices.view(number, sizes[index])
    total = first.to(accum_dtype(first.dtype))
    for other in others:  # one by one: the order of the replicas decides the bits
        total.add_(other)
    into.copy_(total.div_(number) if mean else total)
    return slices


def in_bucket(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of dense tensors in their memory order, one behind the other."""
    return torch.cat([in_memory_order(tensor).view(-1) for tensor in tensors])


def copy_from_bucket(bucket: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    parts = bucket.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        in_memory_order(tensor).view(-1).copy_(part)


def shard_of(bucket: torch.Tensor, begins: Sequence[int], index: int) -> torch.Tensor:
    return bucket[begins[index] : begins[index + 1]]
