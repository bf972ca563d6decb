"""What a value is of the rows of a microbatch, and why an op is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import fx

from fxpipe.capture.rows.place import Place

BY_PLACE = (
    "it takes some rows by their place in the microbatch; the leading dimension of each leaf is its rows"
)
RELATIVE = "it makes each row of several"
CHOICE = "it chooses among the rows"
FUNCTION = "it is another function of a sum over rows"
STATISTIC = "it takes a number of all rows for each of them"
FREQUENCY = "its gradient is divided by how often the rows have each word"
UNKNOWN = "it is an op of which fxpipe does not know whether it makes each row by itself"


class Form(Enum):
    """The same for all rows; a part for each, in dimensions that are known; their sum or mean; made of rows
    in a way that is not known."""

    SAME, EACH, SUMMED, LOST = range(4)


class Rows(NamedTuple):
    """``places``: of the rows, for ``Form.EACH``.

    ``is_data``: whether the value follows from the batch, constants and buffers that stay.
    ``is_whole``: whether nothing that it is made of was told.
    ``is_count``: of a sum, whether nothing but other sums was added.
    ``is_told``: of a sum, whether an op on the way to it was told.
    ``is_order``: whether integers say how many of the rows before each had something, as places in a queue.
    ``plus``: the op that added a sum to a part for each row, which a mean over them may take.
    """

    form: Form
    places: tuple[Place, ...] = ()
    is_data: bool = True
    is_whole: bool = True
    is_count: bool = True
    is_told: bool = False
    is_order: bool = False
    plus: fx.Node | None = None


SAME, SUMMED, LOST = map(Rows, (Form.SAME, Form.SUMMED, Form.LOST))


def each(places: Iterable[Place]) -> Rows:
    """A value with a part for each row at these places; lost, if there is none.  What is made of rows and of
    groups of them has a part for each group."""
    unique = dict.fromkeys(places)
    most = {dim: max(p.group for p in unique if p.dim == dim) for dim in {p.dim for p in unique}}
    coarse = tuple(p for p in unique if p.group == most[p.dim])
    return Rows(Form.EACH, coarse) if coarse else LOST


def packet_of(node: fx.Node) -> Any:
    """The op without its overload; None of what is no op of torch."""
    return getattr(node.target, "overloadpacket", None)


def value_of(node: fx.Node) -> torch.Tensor | None:
    """The traced value, or the first of several."""
    value: Any = node.meta["val"]
    if isinstance(value, list | tuple):
        value = next((x for x in value if isinstance(x, torch.Tensor)), None)
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: fx.Node) -> Sequence[int]:
    value = value_of(node)
    return () if value is None else value.shape


def is_float(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and (value.is_floating_point() or value.is_complex())
