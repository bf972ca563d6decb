"""Sums over replicas that all run in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fxpipe.errors import RunError
from fxpipe.runtime.program.replicas import add_shard, shard_of
from fxpipe.runtime.ranks.local import FlatMessage, Joint, LocalWorld, layout_of, text_of


class LocalReplicas:
    """One rank of all replicas in a LocalWorld, or one of its lanes."""

    def __init__(self, world: LocalWorld, rank: int, replica: int, lane: int = 0):
        self._world, self._rank, self.index, self._lane = world, rank, replica, lane

    @property
    def number(self) -> int:
        return self._world.replicas

    def reduce(
        self, bucket: torch.Tensor, begins: Sequence[int], into: torch.Tensor, *, mean: bool
    ) -> Callable[[], None]:
        """Sum a bucket over replicas, into itself: all replicas here have the same parameters."""
        joint = self._join(bucket)

        def reduced() -> None:
            buckets = self._taken(joint, bucket)
            for index in range(self.number):

                def exchange(slices: torch.Tensor, *_: object) -> None:
                    parts = [shard_of(each, begins, index) for each in buckets]  # noqa: B023 - called at once
                    torch.cat(parts, out=slices)

                add_shard(bucket, begins, index, exchange, shard_of(into, begins, index), mean=mean)

        return reduced

    def wait(self, work: Callable[[], None]) -> None:
        work()

    def copy_first(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(self._taken(self._join(tensor), tensor)[0])

    def _join(self, tensor: torch.Tensor) -> Joint:
        group = "replicas", self._rank, self._lane
        return self._world.join(group, self.index, FlatMessage.of(tensor))

    def _taken(self, joint: Joint, expected: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all replicas, in their order.  Raises RunError for one that is not like this one."""
        world, layout = self._world, layout_of(expected)
        number = world.number(self._rank, self.index, self._lane)
        what = f"rank {self._rank} of all replicas"
        sent = world.take(joint, range(self.number), self.number, number, what)
        for replica, other in enumerate(sent):
            if other.layout != layout:
                raise RunError(
                    f"Replica {replica} gives {text_of(other.layout)} (shape, strides, dtype) to a sum, and "
                    f"replica {self.index} {text_of(layout)}. Run the same program on all replicas."
                )
        return [one.flat.as_strided(expected.shape, expected.stride()) for one in sent]
