"""The part that a process holds of a tensor of the whole model: rows, a lane's share, or rows of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fxpipe.plan.artifact import Plan
from fxpipe.plan.lanes import padded
from fxpipe.plan.rows import ShardName


class PartSpan(NamedTuple):
    """A part of a dimension that is ``whole`` long, by its ``begin`` and ``length``.  ``zeros``: how many a
    process holds behind it."""

    begin: int
    length: int
    whole: int
    zeros: int = 0


#: Dimension -> the part that is held; of other dimensions all is.
Spans = Mapping[int, PartSpan]


def spans_of(plan: Plan, name: ShardName, lane: int) -> dict[int, PartSpan]:
    """What a lane holds under a name, which may be that of rows of what the lane has."""
    shape, shares = plan.layouts[name.tensor].shape, dict[int, tuple[int, int]]()
    # Rows of a vocabulary table, or of a replica, are of the first dimension.
    spans = {0: PartSpan(name.begin, name.end - name.begin, shape[0])} if name.is_part else {}
    for dim, group in plan.lanes.shares(name.tensor):  # a dimension may be shared out more than once
        index, number = shares.get(dim, (0, 1))
        shares[dim] = index * group.number + group.index(lane), number * group.number
    for dim, (index, number) in shares.items():
        begin, length, size, _ = spans.get(dim, PartSpan(0, shape[dim], shape[dim]))
        # Rows of a share are counted within it.
        begin += index * size
        whole = plan.lanes.lengths.get(name.tensor, number * size)
        # The last shares of a dimension that is not divided evenly end with zeros, or are nothing else.
        real = max(0, min(length, whole - begin))
        spans[dim] = PartSpan(min(begin, whole), real, whole, length - real)
    return spans


def with_zeros(part: torch.Tensor, spans: Spans, shape: Sequence[int]) -> torch.Tensor:
    """A part of a tensor of this shape, as ``slices_of`` gives it, with the zeros that a process holds."""
    for dim, (_, length, whole, zeros) in spans.items():
        if dim < len(shape) and shape[dim] == whole:
            part = padded(part, dim, length + zeros)
    return part


def without_zeros(share: torch.Tensor, spans: Spans) -> torch.Tensor:
    """What a process has of a tensor, or of an optimizer's state of it, without zeros: a view."""
    for dim, (_, length, _, zeros) in spans.items():
        if zeros and share.shape[dim : dim + 1] == (length + zeros,):
            share = share.narrow(dim, 0, length)
    return share


def slices_of(shape: Sequence[int], spans: Spans) -> tuple[slice, ...]:
    """The place of a part in a tensor of this shape.

    Of an optimizer's state of a parameter, which may have fewer dimensions, all is held of a dimension that
    is not as long as the parameter's.
    """
    slices = [slice(0, length) for length in shape]
    for dim, (begin, length, whole, _) in spans.items():
        if dim < len(shape) and shape[dim] == whole:
            slices[dim] = slice(begin, begin + length)
    return tuple(slices)


def place_of(whole: torch.Tensor, spans: Spans, first_row: int = 0) -> torch.Tensor:
    """The part of a tensor that has these spans, as a view.  first_row: of a tensor that is rows itself."""
    for dim, (begin, length, _, _) in spans.items():
        whole = whole.narrow(dim, begin - (0 if dim else first_row), length)
    return whole
