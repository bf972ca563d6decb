"""Sums over replicas, or over lanes, that all run in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fxpipe.errors import RunError
from fxpipe.plan.lanes import LaneGroup
from fxpipe.runtime.program.replicas import add_shard, copy_from_bucket, in_bucket, shard_of
from fxpipe.runtime.ranks.local import FlatMessage, Joint, LocalWorld, layout_of, text_of
from fxpipe.runtime.torch_private import no_modes, storage_number


class LocalReplicas:
    """One rank of all replicas in a LocalWorld, or one of its lanes; with ``along`` lanes of one replica."""

    def __init__(
        self, world: LocalWorld, rank: int, replica: int, lane: int = 0, along: LaneGroup | None = None
    ):
        self._world, self._process = world, world.number(rank, replica, lane)
        if along is None:
            self.index, self.number, self._what = replica, world.replicas, f"rank {rank} of all replicas"
            self._group: tuple[object, ...] = ("replicas", rank, lane)
        else:
            self.index, self.number, self._what = along.index(lane), along.number, f"lanes of rank {rank}"
            self._group = ("sums", rank, replica, *along.members(lane))
        self._name = "replica" if along is None else "lane"
        self._is_last = along is None  # of the sums of a bucket

    def reduce(
        self, bucket: torch.Tensor, begins: Sequence[int], into: torch.Tensor, *, mean: bool
    ) -> Callable[[], None]:
        joint = self._join(bucket)

        def reduced() -> None:
            buckets = self._taken(joint, bucket)
            adds = storage_number(into) != storage_number(bucket)
            for index in range(self.number) if into is bucket else [self.index]:

                def exchange(slices: torch.Tensor, *_: object) -> None:
                    parts = [shard_of(each, begins, index) for each in buckets]  # noqa: B023 - called at once
                    torch.cat(parts, out=slices)

                shard = shard_of(bucket, begins, index)
                add_shard(bucket, begins, index, exchange, shard, mean=mean)
                if adds:
                    into.add_(shard)

        if self._is_last:
            return reduced
        reduced()  # a sum over the replicas may come next, of its result
        return lambda: None

    def wait(self, work: Callable[[], None]) -> None:
        work()

    def copy_first(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(self._taken(self._join(tensor), tensor)[0])

    def _join(self, tensor: torch.Tensor) -> Joint:
        return self._world.join(self._group, self.index, FlatMessage.of(tensor))

    def _taken(self, joint: Joint, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all, in their order.  Raises RunError for one that is not like this one."""
        sent = self._world.take(joint, range(self.number), self.number, self._process, self._what)
        layout = layout_of(tensor)
        for number, other in enumerate(sent):
            if other.layout != layout:
                raise RunError(
                    f"{self._name.capitalize()} {number} gives {text_of(other.layout)} (shape, strides, "
                    f"dtype) to a sum, and {self._name} {self.index} {text_of(layout)}. Run the same program "
                    "on all of them."
                )
        with no_modes():  # as for messages: the memory of others is not this process's
            return [one.flat.as_strided(tensor.shape, tensor.stride()) for one in sent]


class LocalShards:
    """The processes in a LocalWorld that own rows of the same parameters, for one of them."""

    def __init__(self, world: LocalWorld, rank: int, replica: int, lane: int, lanes: LaneGroup):
        self._world, self._process = world, world.number(rank, replica, lane)
        self._owner, self._owners = (
            lanes.index(lane) * world.replicas + replica,
            lanes.number * world.replicas,
        )
        self._group = "shards", rank, *lanes.members(lane)
        self._what = f"the other owners of the parameters of rank {rank}"

    def gather(
        self, tensors: Sequence[torch.Tensor], begins: Sequence[int]
    ) -> tuple[Joint, Sequence[torch.Tensor]]:
        shard = shard_of(in_bucket(tensors), begins, self._owner)
        return self._world.join(self._group, self._owner, shard.clone()), tensors

    def wait(self, work: tuple[Joint, Sequence[torch.Tensor]]) -> None:
        joint, tensors = work
        owners = range(self._owners)
        shards = self._world.take(joint, owners, self._owners, self._process, self._what)
        copy_from_bucket(torch.cat(shards), tensors)
