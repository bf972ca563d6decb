"""Where the rows of a microbatch lie in a value, and where ops that keep its numbers put them.

view(x, [14, 6])               of [2, 7, 6]: the rows are in the first dimension still, 7 entries each
cat([x, x])                    twice, one after the other, in that dimension
transpose(x, 0, 1)             in the second one
view(x, [7, 2, 6])             of 14 rows: 7 groups of 2 neighbours, which are together in a batch as well
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Place(NamedTuple):
    """The rows of a microbatch in a dimension, which is ``outer`` × rows × ``inner`` entries long; or as many
    groups of ``group`` rows each as there are."""

    dim: int
    outer: int = 1
    inner: int = 1
    group: int = 1

    def at(self, dim: int) -> Place:
        return self._replace(dim=dim)

    def reshaped(self, rows: int, before: Sequence[int], after: Sequence[int]) -> Place | None:
        """The place behind a change of shape; None where the border of two rows lies within a dimension."""
        outer, rows = prod(before[: self.dim]) * self.outer, rows // self.group
        if rows == 1:
            return self._of_one(before, after)
        for dim, size in enumerate(after):
            left = prod(after[:dim])
            if left and left * size >= outer * rows:
                inner, rest = divmod(left * size, outer * rows)
                return (
                    None if rest or outer % left else self._replace(dim=dim, outer=outer // left, inner=inner)
                )
        return None

    def split(self, rows: int, before: Sequence[int], after: Sequence[int]) -> Place | None:
        """The place of groups of as many neighbours, where a change of shape makes such."""
        if self.outer > 1 or self.group > 1 or prod(before[: self.dim]) > 1:
            return None
        for dim in range(len(after) - 1):
            number = prod(after[: dim + 1])
            if 1 < number < rows and rows % number == 0:
                return Place(dim, number // after[dim], 1, rows // number)
        return None

    def _of_one(self, before: Sequence[int], after: Sequence[int]) -> Place | None:
        """One row may lie anywhere behind other dimensions: [4, 1, 6] is [4, 6] of 4 times [6]
        or of [4, 6] once."""
        if self.outer * prod(before[: self.dim]) == 1:
            return Place(0, 1, after[0]) if after else None
        stays = [*before[: self.dim + 1]] == [*after[: self.dim + 1]]
        return self if stays else None

    def part(self, rows: int, start: int, size: int, step: int = 1) -> Place | None:
        """The place in some of the entries of its dimension; None where they have not all rows alike."""
        unit = rows // self.group * self.inner
        if step == 1 and not start % unit and not size % unit and size:
            return self._replace(outer=size // unit)
        is_within = self.inner > 1 and step > 1 and not self.inner % step and size * step == self.outer * unit
        return self._replace(inner=self.inner // step) if is_within else None


def without(dim: int, gone: Sequence[int] | set[int]) -> int:
    """A dimension's number when others are gone."""
    return dim - sum(other < dim for other in gone)
