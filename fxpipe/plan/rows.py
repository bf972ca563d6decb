"""The names of the tensors that ranks hold: those of the model, and of some rows of one."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

import torch

_OF_ROWS = re.compile(r"(.+)\[([0-9]{1,15}):([0-9]{1,15})\]", re.DOTALL)


class ShardName(str):
    """The name of a tensor of the model, or of some of its rows: ``"lm_head.weight[0:128]"``.

    It is a text, the key of the tensor in programs, plans and files, and knows what it names: ``tensor``, the
    name in the model, and the rows from ``begin`` to ``end``, which is ``sys.maxsize`` for all rows.
    """

    tensor: str
    begin: int
    end: int

    def __new__(cls, name: str) -> ShardName:
        shard, match = super().__new__(cls, name), _OF_ROWS.fullmatch(name)
        # No number of rows is needed to name all of them.
        shard.tensor, shard.begin, shard.end = name, 0, sys.maxsize
        if match:
            shard.tensor, shard.begin, shard.end = match[1], int(match[2]), int(match[3])
        return shard

    @classmethod
    def of_rows(cls, tensor: str, begin: int, end: int) -> ShardName:
        return cls(f"{tensor}[{begin}:{end}]")

    @property
    def is_part(self) -> bool:
        """Whether it names rows."""
        return self.end < sys.maxsize

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What it names of the model's tensor, as a view of it; the tensor itself if that is all of it."""
        return tensor[self.begin : self.end] if self.is_part else tensor

    def contains(self, other: ShardName) -> bool:
        """Whether all that the other one names is part of this."""
        return self.tensor == other.tensor and self.begin <= other.begin and other.end <= self.end


def joined(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Concatenate the rows of each tensor; whole tensors stay."""
    parts: dict[str, list[ShardName]] = {}
    for name in map(ShardName, tensors):
        parts.setdefault(name.tensor, []).append(name)
    return {
        tensor: torch.cat([tensors[name] for name in sorted(names, key=lambda name: name.begin)])
        if names[0].is_part
        else tensors[tensor]
        for tensor, names in parts.items()
    }
