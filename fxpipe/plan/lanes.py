"""Lanes in a plan: processes that share each op of a rank.

World rank = (replica * ranks + rank) * lanes + lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch

from fxpipe.plan.rows import ShardName
from fxpipe.plan.step import MOST_RANKS
from fxpipe.plan.tensors import MOST_DIMENSIONS
from fxpipe.strict import between


@dataclass(frozen=True)
class LanePlan:
    """The lanes of each rank.  ``number``: of them.  ``shards``: the parameters and buffers of which each
    lane holds a share, and the dimension that is shared out, evenly; all lanes hold the others whole.
    ``summed``: of these the parameters whose gradients the step sums over the lanes."""

    number: Annotated[int, between(1, MOST_RANKS)]
    shards: dict[str, Annotated[int, between(0, MOST_DIMENSIONS)]] = field(default_factory=dict)
    summed: tuple[str, ...] = ()

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor of which a lane has one of this shape."""
        dim = self.shards.get(name)
        return shape if dim is None else (*shape[:dim], shape[dim] * self.number, *shape[dim + 1 :])

    def sums(self, name: ShardName) -> bool:
        """Whether the step sums the gradient of a parameter, or of rows of it, over the lanes."""
        return name.tensor in self.summed

    def share(self, name: str, whole: torch.Tensor, lane: int) -> torch.Tensor:
        """What a lane holds of a tensor: a view, or the tensor itself."""
        dim = self.shards.get(name)
        return whole if dim is None else whole.chunk(self.number, dim)[lane]

    def joined(self, name: str, shares: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor, from what the lanes hold in their order."""
        dim = self.shards.get(name)
        return shares[0] if dim is None else torch.cat([*shares], dim)


NO_LANES = LanePlan(1)
