"""Lanes in a plan: processes that share each op of a rank, as a mesh of one dimension or several.

World rank = (replica * ranks + rank) * lanes + lane; lanes are numbered with the last dimension innermost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import mul
from typing import Annotated

import torch

from fxpipe.plan.field_types import MOST_DIMENSIONS
from fxpipe.plan.rows import ShardName
from fxpipe.plan.step import MOST_RANKS
from fxpipe.strict import at_least, between, entries

#: Dimensions of a mesh of lanes.
MOST_AXES = 4


@dataclass(frozen=True, order=True)
class LaneGroup:
    """Lanes that exchange values: ``number`` of them, each ``stride`` behind the one before.  Each lane is in
    one such group."""

    number: int
    stride: int = 1

    def index(self, lane: int) -> int:
        """The place of a lane in its group."""
        return lane // self.stride % self.number

    def first(self, lane: int) -> int:
        """The first lane of the group of this one."""
        return lane - self.index(lane) * self.stride

    def members(self, lane: int) -> list[int]:
        """The lanes of the group of this one."""
        return [self.first(lane) + k * self.stride for k in range(self.number)]

    @property
    def arguments(self) -> tuple[int, ...]:
        """The arguments that name the group in an op between lanes: a stride of 1 is left out."""
        return (self.number,) if self.stride == 1 else (self.number, self.stride)

    @property
    def named(self) -> dict[str, int]:
        """The group as ops between lanes name it."""
        return dict(zip(("n", "stride"), self.arguments, strict=False))


ONE_LANE = LaneGroup(1)


@dataclass(frozen=True)
class LaneAxis:
    """A dimension of the mesh of lanes.  ``number``: of lanes along it.  ``shards``: the parameters and
    buffers of which each of these holds a share, and the dimension that is shared out, evenly; they all hold
    the same of the others.  ``summed``: the parameters among these whose gradients the step sums over the
    lanes along it."""

    number: Annotated[int, between(1, MOST_RANKS)]
    shards: dict[str, Annotated[int, between(0, MOST_DIMENSIONS)]] = field(default_factory=dict)
    summed: tuple[str, ...] = ()


@dataclass(frozen=True)
class LanePlan:
    """The lanes of each rank.  ``axes``: the dimensions of their mesh, none for a rank of one process.
    ``lengths``: of tensors that lanes cannot share evenly, the length of the one dimension that they share;
    zeros behind it fill up the last shares."""

    axes: Annotated[tuple[LaneAxis, ...], entries(0, MOST_AXES)] = ()
    lengths: dict[str, Annotated[int, at_least(1)]] = field(default_factory=dict)

    @cached_property
    def number(self) -> int:
        return prod(axis.number for axis in self.axes)

    @cached_property
    def groups(self) -> tuple[LaneGroup, ...]:
        """The lanes along each dimension."""
        numbers = [axis.number for axis in self.axes]
        # The last dimension is innermost: along it the numbers of lanes follow each other.
        strides = [*accumulate(reversed(numbers), mul, initial=1)][-2::-1]
        return tuple(map(LaneGroup, numbers, strides))

    @cached_property
    def shared(self) -> frozenset[str]:
        """The tensors of which lanes have different shares."""
        return frozenset(name for axis in self.axes for name in axis.shards)

    @cached_property
    def summed(self) -> dict[str, LaneGroup]:
        """The parameters whose gradients the step sums over lanes, each with these lanes."""
        along = zip(self.axes, self.groups, strict=True)
        return {name: group for axis, group in along for name in axis.summed}

    def shares(self, name: str) -> Iterator[tuple[int, LaneGroup]]:
        """The dimensions of a tensor that are shared out, from the outermost share to the innermost, with the
        lanes over which each is."""
        for axis, group in zip(self.axes, self.groups, strict=True):
            if name in axis.shards:
                yield axis.shards[name], group

    def holders(self, name: str) -> list[int]:
        """The first lane to hold each share of a tensor; the first of all for one that all hold whole."""
        return sorted({self.holder(name, lane) for lane in range(self.number)})

    def holder(self, name: str, lane: int) -> int:
        """The first lane that holds the same share as this one."""
        for axis, group in zip(self.axes, self.groups, strict=True):
            if name not in axis.shards:
                lane = group.first(lane)
        return lane

    def firsts(self, name: str, processes: Sequence[int]) -> dict[int, int]:
        """Find for each lane the first of these processes that holds the same share of a tensor as it does,
        where one does; lanes are the last digits of the processes' numbers."""
        first: dict[int, int] = {}
        for process in processes:
            first.setdefault(self.holder(name, process % self.number), process)
        holders = ((lane, self.holder(name, lane)) for lane in range(self.number))
        return {lane: first[holder] for lane, holder in holders if holder in first}

    def dividing(self, names: Sequence[ShardName]) -> LaneGroup:
        """The lanes among which parameters are divided, where replicas divide theirs: those along which the
        gradients are summed, or all parameters are the same, and so are their gradients."""
        groups = {self._dividing(name.tensor) for name in names}
        return groups.pop() if len(groups) == 1 else ONE_LANE

    def divisor(self, name: str) -> int:
        """The number of lanes among which a parameter, or rows of it, may be divided."""
        return self._dividing(ShardName(name).tensor).number

    def _dividing(self, name: str) -> LaneGroup:
        if name in self.summed:
            return self.summed[name]
        if name not in self.shared:
            return LaneGroup(self.number)
        along = zip(self.axes, self.groups, strict=True)
        whole = (group for axis, group in along if name not in axis.shards and group.number > 1)
        return max(whole, key=lambda group: group.number, default=ONE_LANE)

    def arguments(self, group: LaneGroup) -> tuple[int, ...]:
        """The arguments that name a group in a call of ``rt``: none for all lanes."""
        return () if group.number == self.number else (group.number, group.stride)

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor of which a lane has one of this shape."""
        for dim, group in self.shares(name):
            length = self.lengths.get(name, shape[dim] * group.number)
            shape = (*shape[:dim], length, *shape[dim + 1 :])
        return shape

    def sums(self, name: ShardName) -> LaneGroup | None:
        """The lanes over which the step sums the gradient of a parameter, or of rows of it."""
        return self.summed.get(name.tensor)

    def share(self, name: str, whole: torch.Tensor, lane: int) -> torch.Tensor:
        """What a lane holds of a tensor: a view, or the tensor itself, where no zeros are behind it."""
        shares = [*self.shares(name)]
        if name in self.lengths:
            dim, lanes = shares[0][0], prod(group.number for _, group in shares)
            whole = padded(whole, dim, -(-self.lengths[name] // lanes) * lanes)
        for dim, group in shares:
            whole = whole.chunk(group.number, dim)[group.index(lane)]
        return whole

    def joined(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor, from what the lanes hold in their order."""
        # The innermost dimension first: its lanes are next to each other in ``parts``.
        for axis in reversed(self.axes):
            along = (parts[k : k + axis.number] for k in range(0, len(parts), axis.number))
            dim = axis.shards.get(name)
            parts = [each[0] if dim is None else torch.cat([*each], dim) for each in along]
        whole = parts[0]
        if name in self.lengths:
            whole = whole.narrow(next(self.shares(name))[0], 0, self.lengths[name])
        return whole


def padded(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """A tensor with zeros behind it along a dimension."""
    more = [0] * (2 * (tensor.dim() - dim) - 1) + [length - tensor.shape[dim]]
    return torch.constant_pad_nd(tensor, more) if more[-1] else tensor


NO_LANES = LanePlan()
