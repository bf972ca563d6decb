"""How a dimension of an operand goes through an op: to a dimension of the result, or into it.

``through(transpose(x, 0, 1), x, 0)``       1
``through(sum(x, [0]), x, 1)``              0
``through(sum(x, [0]), x, 0)``              ``Lost.SUMMED``
``through(cumsum(x, 0), x, 0)``             ``Lost.MIXED``
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import fx

from fxpipe.ir.storage import argument

aten = torch.ops.aten


class Lost(Enum):
    """What becomes of a dimension that is none of the result: its entries are added up, or their mean is
    taken; anything else, also of an op that is not known."""

    SUMMED, MIXED = range(2)


SUMS = {aten.sum, aten.mean, aten.nansum, aten.count_nonzero}
COPIES = {aten.clone, aten._to_copy, aten.alias, aten.detach, aten.contiguous}
RESHAPES = {aten.view, aten._unsafe_view, aten.reshape}
TRANSPOSES = {aten.t, aten.transpose, aten.permute}
#: Ops along dimensions that they name, which leave the others as they are.
_ALONG = SUMS | {
    aten.all, aten.amax, aten.amin, aten.any, aten.argmax, aten.argmin, aten.cat, aten.cumsum, aten.flip,
    aten.gather, aten.index_select, aten.max, aten.min, aten.prod, aten.select, aten.select_backward,
    aten.slice, aten.sort, aten.split, aten.split_with_sizes, aten.squeeze, aten.stack, aten.topk,
    aten.unsqueeze,
}  # fmt: skip


def is_pointwise(node: fx.Node) -> bool:
    """Whether an op computes each entry of its result from the entries at the same place."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def through(node: fx.Node, x: fx.Node, dim: int) -> int | Lost:
    """The dimension of the result each of whose entries is made of that entry of ``dim`` of an operand alone,
    and of operands without such a dimension."""
    packet = getattr(node.target, "overloadpacket", None)
    before, after = _shape(x), _shape(node)
    named = dims_of(node, len(before)) if packet in _ALONG else set()
    if packet is None:  # an item of several results
        return dim
    if is_pointwise(node) or packet in COPIES or packet is aten.expand:
        return dim + len(after) - len(before)  # they are aligned at the last dimension
    if packet in RESHAPES:
        # As many elements before it: then it is the same dimension, whatever the others became.
        same = (k for k, n in enumerate(after) if (n, prod(after[:k])) == (before[dim], prod(before[:dim])))
        return next(same, Lost.MIXED)
    if packet in TRANSPOSES:
        return order_behind(node).index(dim)
    if packet is aten.constant_pad_nd:
        return dim if dim < len(before) - len(node.args[1]) // 2 else Lost.MIXED  # type: ignore[arg-type]
    if named is None or packet not in _ALONG or (dim in named and len(after) <= len(before)):
        return Lost.SUMMED if packet in SUMS else Lost.MIXED
    if len(after) > len(before):  # of the result
        return dim + sum(new <= dim for new in named)
    return dim - sum(gone < dim for gone in named) if len(after) < len(before) else dim


def order_behind(node: fx.Node) -> list[int]:
    """The dimensions of what an op transposes, in the order of the result."""
    order = [*range(len(_shape(node)))]
    if node.target is aten.permute.default:
        return [dim % len(order) for dim in node.args[1]]  # type: ignore
    one, other = (0, -1) if node.target is aten.t.default else node.args[1:3]
    order[one], order[other] = order[other], order[one]  # type: ignore[index]
    return order


def dims_of(node: fx.Node, before: int) -> set[int] | None:
    """The dimensions that an op names, of its operand or, where it has one more, of its result; None for
    all."""
    dims: Any = argument(node, "dim", argument(node, "dims"))
    if dims is None or dims == []:
        return None
    size = max(before, len(_shape(node)))
    return {d % size for d in (dims if isinstance(dims, Sequence) else [dims])}


def _shape(node: fx.Node) -> Sequence[int]:
    """The shape of a value, or of the first of several."""
    value = node.meta["val"]
    return (value[0] if isinstance(value, list | tuple) else value).shape  # type: ignore[no-any-return]
