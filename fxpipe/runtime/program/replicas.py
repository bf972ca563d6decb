"""The same rank of all replicas of a pipeline: sums of gradients over them, and gathers of their shards.

A *bucket* is the memory of several gradients, or parameters, one behind the other.  Each replica owns a slice
of it, its *shard*: it gets that slice of all replicas, and adds them up in the replicas' order.  So all of
them have the same bits, and the work is spread over them.  Lanes with gradients of the same parameters are to
each other as replicas are; where both divide a bucket, the lanes do first, so that replicas, whose links are
slower, exchange a lane's part alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from fxpipe.errors import RunError
from fxpipe.plan.lanes import ONE_LANE, LaneGroup
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


@dataclass(frozen=True)
class Division:
    """A bucket by its owners, in turns all replicas of each lane of ``lanes``.

    ``begins``: where their shards begin, and the end of the last.  ``pieces``: of each shard; none if all
    have the whole bucket, and shards are those of a sum.
    """

    begins: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...] = ()
    lanes: LaneGroup = ONE_LANE

    @property
    def size(self) -> int:
        return self.begins[-1]

    @property
    def replicas(self) -> int:
        return (len(self.begins) - 1) // self.lanes.number

    def owner(self, replica: int, lane: int) -> int:
        """The number of the shard of a process."""
        return self.lanes.index(lane) * self.replicas + replica


@dataclass(eq=False)
class Bucket:
    """A bucket of a plan in this process: its memory, its division by the replicas, and its use.

    ``flat``: the memory of its gradients; None for memory that is made when it is needed, of ``dtype`` on
    ``device``.  ``owner``: the number of this process's shard.  ``layouts``: the shapes and strides of the
    gradients, and of their parameters.  ``is_frozen``: whether it has parameters alone.

    ``level``: what processes divide between them.
    ``parameters``: those of the gradients, where each process has all of them and has updated rows alone.
    ``owned``: else the rows that this process has, of ``parameter_dtype``, one for each of its ``pieces``.
    ``of_lane``: the gradients that it has of the sum over lanes, until that over the replicas.  ``summed``:
    those that it has after both.
    """

    names: tuple[ShardName, ...]
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    dtype: torch.dtype
    device: torch.device
    division: Division
    owner: int = 0
    level: Shard = ""
    is_frozen: bool = False
    flat: torch.Tensor | None = None
    parameters: tuple[torch.Tensor, ...] = ()
    owned: tuple[torch.Tensor, ...] = ()
    parameter_dtype: torch.dtype | None = None
    of_lane: torch.Tensor | None = None
    summed: torch.Tensor | None = None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The rows that this process owns, in its shard."""
        return self.division.pieces[self.owner] if self.division.pieces else ()

    @property
    def whole(self) -> torch.Tensor:
        """The accumulators' memory; zeros, where nothing was added yet."""
        if self.flat is None:
            self.flat = torch.zeros(self.division.size, dtype=self.dtype, device=self.device)
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
        flat = torch.empty(self.division.size, dtype=self.parameter_dtype, device=self.device)
        for piece, rows in zip(self.pieces, self.owned, strict=True):
            flat[piece.begin : piece.end].copy_(in_memory_order(rows).view(-1))
        return flat

    def begin_sum_over_lanes(self, lanes: LaneGroup) -> tuple[torch.Tensor, Sequence[int], torch.Tensor]:
        """The memory that this process gives to the sum, where the parts of the lanes begin, and the memory
        for what it gets."""
        whole = self.whole
        if not self.level:
            return whole, even(len(whole), lanes.number), whole
        division = self.division
        if lanes != division.lanes:
            raise RunError(
                f"The program sums a bucket over {lanes}, and {division.lanes} divide it. Undo the edit."
            )
        begins = division.begins[:: division.replicas]
        self.of_lane = shard_of(whole, begins, self.owner // division.replicas)
        if self.level != "optimizer":
            self.of_lane, self.flat = torch.zeros_like(self.of_lane), None  # the sum alone keeps it
        return whole, begins, self.of_lane

    def begin_sum(self) -> tuple[torch.Tensor, Sequence[int], torch.Tensor]:
        """The memory that this replica gives to the sum, where the shards of the replicas begin, and the
        memory for what it gets.

        Without accumulators between steps, only the sum keeps them from now on.
        """
        number = self.division.replicas
        lane, replica = divmod(self.owner, number)  # owners are in turns all replicas of each lane
        first, *rest = self.division.begins[lane * number :][: number + 1]
        begins = [0, *(begin - first for begin in rest)]
        part = self.whole[first : first + begins[-1]] if self.of_lane is None else self.of_lane
        self.of_lane = None
        if not self.level:
            self.summed = part
        elif self.level == "optimizer":
            self.summed = shard_of(part, begins, replica)
        else:
            self.flat = None  # the sum alone keeps it, until it is over
            if self.summed is None:
                self.summed = torch.zeros_like(shard_of(part, begins, replica))
        return part, begins, self.summed

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
    """The replicas of a rank, for one of them, or lanes with gradients of the same parameters.  ``index``: of
    this one.  ``number``: of all.  All of them call the same, in the same order."""

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
        """Wait until a sum is over."""
        ...

    def copy_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors with their values on replica 0."""
        ...


class Shards(Protocol):
    """The processes that own rows of the same parameters, for one of them."""

    def gather(self, tensors: Sequence[torch.Tensor], begins: Sequence[int]) -> Any:
        """Start to give all of them the shards of all, in a bucket, or in dense tensors that make one."""
        ...

    def wait(self, work: Any) -> None:
        """Wait until a gather is over."""
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


def even(size: int, number: int) -> tuple[int, ...]:
    """Where shards of a bucket begin that differ by at most one element, and the end of the last."""
    return tuple(size * k // number for k in range(number + 1))


def shard_of(bucket: torch.Tensor, begins: Sequence[int], index: int) -> torch.Tensor:
    return bucket[begins[index] : begins[index + 1]]
