"""The rows behind ops that take entries by numbers, or put them there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxpipe.capture.rows import families
from fxpipe.capture.rows.flow import Flow
from fxpipe.capture.rows.forms import (
    BY_PLACE,
    FREQUENCY,
    LOST,
    STATISTIC,
    SUMMED,
    Form,
    Rows,
    each,
    is_float,
    packet_of,
    shape_of,
    value_of,
)
from fxpipe.capture.rows.place import Place
from fxpipe.ir.builder import node_arg
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.storage import argument

aten = torch.ops.aten


def looked_up(flow: Flow, node: fx.Node) -> Rows:
    """A lookup has the rows of its words."""
    table, index = node_arg(node, 0), node_arg(node, 1)
    rows = Rows(*flow.of[index][:2])
    if argument(node, "scale_grad_by_freq") and rows.form is not Form.SAME:
        return flow.tell(node, FREQUENCY, rows)
    if flow.is_sum(table):
        return flow.tell(node, STATISTIC, rows)
    return rows if flow.has(table, Form.SAME) else flow.lost(node)


def bags(flow: Flow, node: fx.Node) -> Rows:
    """A mean of a table's entries for each bag, which begins at an offset, has the rows of the offsets."""
    if not flow.counts_rows(node_arg(node, 2)):
        return flow.lost(node)
    rows = each([Place(0, 1, shape_of(node)[0] // flow.rows)])
    return flow.tell(node, FREQUENCY, rows) if argument(node, "scale_grad_by_freq") else rows


def indexed(flow: Flow, node: fx.Node) -> Rows:
    x = node_arg(node, 0)
    rows, indices = flow.of[x], of_op(node)
    if any(value_of(i).dtype in (torch.bool, torch.uint8) for i in indices.values()):  # type: ignore[union-attr]
        return flow.lost(node)
    size = max(len(shape_of(i)) for i in indices.values())
    are_adjacent = [*indices] == [*range(min(indices), max(indices) + 1)]
    first = min(indices) if are_adjacent else 0
    places = list[Place]()
    for dim, index in indices.items():  # which make dimensions of their own
        of_rows = any(p.dim == dim for p in rows.places)
        of_index = _of_index(flow, index) if of_rows else flow.of[index].places
        places += [p.at(first + p.dim + size - len(shape_of(index))) for p in of_index]
    for p in rows.places:
        if p.dim not in indices:
            gone = sum(dim < p.dim for dim in indices)
            more = 0 if are_adjacent and p.dim < first else size
            places.append(p.at(p.dim - gone + more))
        elif flow.has(indices[p.dim], Form.LOST):
            return LOST
        elif not flow.counts_rows(indices[p.dim]) and not flow.is_single():
            return flow.lost(node, BY_PLACE)
    if flow.has(x, Form.SUMMED):
        return _of_sums(flow, node, each(places))
    if flow.has(x, Form.SAME):
        for dim, index in indices.items():
            shape, before = shape_of(index), first + size - len(shape_of(index))
            is_of_each = any(n == flow.rows and Place(before + d) in places for d, n in enumerate(shape))
            along = Place(dim, 1, shape_of(x)[dim] // flow.rows)
            if is_of_each and flow.counts_rows(index) and flow.differs(x, along):
                return flow.tell(node, BY_PLACE, each(places))
    return each(places)


def _of_sums(flow: Flow, node: fx.Node, rows: Rows) -> Rows:
    """What rows take of sums is told, but of counts, which are followed no more."""
    return flow.tell(node, STATISTIC, rows) if is_float(node) else LOST


def gathered(flow: Flow, node: fx.Node) -> Rows:
    """Entries along one dimension, each by a number of its own, have the rows of value and numbers."""
    x, index = node_arg(node, 0), node_arg(node, 2)
    rows, of_index = flow.of[x], flow.of[index]
    if flow.has(x, Form.SUMMED):
        return _of_sums(flow, node, Rows(*of_index[:2]))
    if Form.LOST in (rows.form, of_index.form):
        return LOST
    if any(p.dim == _dim(node) for p in rows.places) and not flow.is_single():
        return flow.lost(node, BY_PLACE)
    return each((*rows.places, *of_index.places))


def placed(flow: Flow, node: fx.Node) -> Rows:
    """Numbers that are put at places which others name keep rows along the other dimensions."""
    base, packet = node_arg(node, 0), packet_of(node)
    if any(flow.has(x, Form.SUMMED) for x in input_nodes(node)):
        return flow.lost(node, STATISTIC)
    indices = of_op(node)
    if any(flow.has(i, Form.LOST) for i in indices.values()):
        return LOST
    if packet is aten.index_put and _is_mask(indices, node.args[2]):
        of_mask = (p.at(p.dim + dim) for dim, mask in indices.items() for p in flow.of[mask].places)
        return each((*flow.of[base].places, *of_mask))
    of_indices = [p for i in indices.values() for p in flow.of[i].places]
    places = [p for p in flow.of[base].places if p.dim not in indices]
    is_added = packet in families.ADDED or argument(node, "reduce") in ("sum", "add")
    for dim, index in indices.items():
        inner, rest = divmod(shape_of(base)[dim], flow.rows)
        if flow.counts_rows(index) and not rest:
            places.append(Place(dim, 1, inner))
    if packet is aten.index_put:
        is_added = bool(argument(node, "accumulate"))
    else:
        source = node.args[3]
        of_source = flow.of[source].places if isinstance(source, fx.Node) else ()
        is_aligned = packet not in (aten.index_add, aten.index_copy)
        places += [p for p in (*(of_indices if is_aligned else ()), *of_source) if p.dim not in indices]
        of_indices += of_source
    if any(p.dim in indices and p not in places for p in flow.of[base].places) and not flow.is_single():
        return flow.lost(node, BY_PLACE)
    if not places and is_added and of_indices and flow.has(base, Form.SAME):
        return SUMMED
    return each(places) if places else flow.lost(node, BY_PLACE)


def _is_mask(indices: Mapping[int, fx.Node], source: Any) -> bool:
    """Whether one number is put where a mask says."""
    is_number = isinstance(source, fx.Node) and source.meta["val"].numel() == 1
    return (
        is_number and len(indices) == 1 and all(i.meta["val"].dtype is torch.bool for i in indices.values())
    )


def of_op(node: fx.Node) -> Mapping[int, fx.Node]:
    """The indices of an op, each by its dimension."""
    if packet_of(node) in (aten.index, aten.index_put):
        several: Any = node.args[1]
        return {dim: index for dim, index in enumerate(several) if index is not None}
    return {_dim(node): node_arg(node, 2)}


def _dim(node: fx.Node) -> int:
    dim: Any = node.args[1]
    return int(dim % max(1, len(shape_of(node_arg(node, 0)))))


def _of_index(flow: Flow, index: fx.Node) -> tuple[Place, ...]:
    """The places of an index of rows; one that counts them has one for each."""
    rows, shape = flow.of[index], shape_of(index)
    if rows.form is not Form.SAME or not flow.counts_rows(index):
        return rows.places
    dims = [dim for dim, n in enumerate(shape) if n > 1 and n % flow.rows == 0]
    return tuple(Place(dim, 1, shape[dim] // flow.rows) for dim in dims[:1])
