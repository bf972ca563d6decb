"""The heads of an attention that lanes share evenly: those of the model, some of them copied, and zeros.

7 heads of queries for each of 2 of keys, on 4 lanes: 8 for each, and each head of keys twice
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch.nn import functional as F


class Heads(NamedTuple):
    """``keys`` heads of keys, each copied ``copies`` times, and ``each`` of queries for one.  Those that a
    model has not are zeros, and nothing reads what attention gives for them."""

    keys: int
    each: int
    copies: int

    @staticmethod
    @cache
    def over(queries: int, keys: int, lanes: int) -> Heads:
        """The fewest heads that lanes share evenly, and among these those with the fewest copies."""
        of_each = queries // keys
        options = (
            Heads(more, each, copies)
            for more in range(keys, keys + lanes)
            for each in range(of_each, of_each + (lanes if of_each > 1 else 1))
            for copies in range(1, each + 1)
            if not (each % copies or more * copies % lanes)
        )
        return min(options, key=lambda heads: (heads.number, heads.keys * heads.copies))

    @property
    def number(self) -> int:
        """The number of heads of queries."""
        return self.keys * self.each

    def padded(self, x: torch.Tensor, each: int) -> torch.Tensor:
        """All heads, of a value with ``each`` for a head of keys."""
        keys = x.shape[1] // each
        if (keys, each) == (self.keys, self.each):
            return x
        more = (0, 0, 0, 0, 0, self.each - each, 0, self.keys - keys)
        return F.pad(x.unflatten(1, (keys, each)), more).flatten(1, 2)

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """The heads of keys, or of their values."""
        whole = self._replace(each=1).padded(x, 1)
        return whole.repeat_interleave(self.copies, 1) if self.copies > 1 else whole

    def real(self, x: torch.Tensor, keys: int, each: int) -> torch.Tensor:
        """The heads that the model has, among all."""
        if (keys, each) == (self.keys, self.each):
            return x
        groups: torch.Tensor = x.unflatten(1, (self.keys, self.each))
        return groups[:, :keys, :each].flatten(1, 2)
