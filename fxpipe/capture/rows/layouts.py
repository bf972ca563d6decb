"""The rows behind ops that give entries other places: parts, shapes, values side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.capture.rows import families
from fxpipe.capture.rows.flow import Flow
from fxpipe.capture.rows.forms import (
    BY_PLACE,
    LOST,
    SAME,
    STATISTIC,
    SUMMED,
    UNKNOWN,
    Form,
    Rows,
    each,
    is_float,
    packet_of,
    shape_of,
    value_of,
)
from fxpipe.capture.rows.place import Place, without
from fxpipe.ir.builder import node_arg
from fxpipe.ir.dims import RESHAPES, dims_of, order_behind
from fxpipe.ir.storage import argument

aten = torch.ops.aten


def reshaped(flow: Flow, node: fx.Node) -> Rows:
    x = node_arg(node, 0)
    before, after = shape_of(x), shape_of(node)
    places, gone = flow.of[x].places, dims_of(node, len(before)) or {*range(len(before))}
    if len(places) == 1 and (groups := places[0].split(flow.rows, before, after)):
        flow.split[node] = groups.dim
        return each([groups])
    if packet_of(node) in RESHAPES and places and after[:1] == (1,) != before[:1]:
        flow.is_unsure = True  # one group, of all rows
    if packet_of(node) is aten.squeeze and any(p.dim in gone for p in places):
        flow.is_single()
    return flow.moved(node, lambda p: p.reshaped(flow.rows, before, after))


def transposed(flow: Flow, node: fx.Node) -> Rows:
    order = order_behind(node)
    return flow.moved(node, lambda p: p.at(order.index(p.dim)))


def item(flow: Flow, node: fx.Node) -> Rows:
    """One of several results has the rows where the first one has them, or none."""
    x = node_arg(node, 0)
    rows, shape = flow.of[x], shape_of(node)
    if rows.form is not Form.EACH:
        return Rows(rows.form)
    if packet_of(x) in families.PARTS:
        return part(flow, x, node)
    places = [p for p in rows.places if p.dim < len(shape) and shape[p.dim] == flow.size(p)]
    return each(places) if places else SUMMED if "_backward" in packet_of(x).__name__ else SAME


def part(flow: Flow, node: fx.Node, one_of: fx.Node | None = None) -> Rows:
    """Some of the entries along a dimension; ``one_of`` the several results that an op has."""
    x = node_arg(node, 0)
    rows, packet = flow.of[x], packet_of(node)
    if rows.form is not Form.EACH:
        return Rows(rows.form)
    dim = next(iter(dims_of(node, len(shape_of(x))) or {0}))
    is_one = packet in (aten.select, aten.unbind)
    along = next((p for p in rows.places if p.dim == dim), None)
    others = [p.at(p.dim - (is_one and p.dim > dim)) for p in rows.places if p.dim != dim]
    if along is None:
        return each(others)
    length, step, start = flow.size(along), 1, 0
    if packet is aten.slice:
        start = (argument(node, "start") or 0) % length  # type: ignore[operator]
        step = argument(node, "step", 1)  # type: ignore[assignment]
        size = shape_of(node)[dim]
    elif packet is aten.select:
        start, size = argument(node, "index") % length, 1  # type: ignore[operator]
    elif one_of is None:
        return rows  # of all: each is looked at by itself
    else:
        number: Any = one_of.args[1]
        sizes = [1 if is_one else each_part.shape[dim] for each_part in node.meta["val"]]
        start, size = sum(sizes[:number]), sizes[number]
    behind = along.part(flow.rows, start, size, step)
    if behind is not None and not is_one:
        return each((*others, behind))
    is_each = step > 1 and along.outer == 1 and length % step == 0 and size * step == length
    is_group = along.group > 1
    if is_each or others or is_group or flow.on_lanes or not is_float(x) or flow.is_single():
        return each(others)
    taker = one_of or node
    row, rest = divmod(start, along.inner)
    if size == along.inner and not rest:  # of one row, all that lies there
        row %= flow.rows
        flow.taken.setdefault(x, []).append((taker, row))
        flow.single[taker] = frozenset({row})
        return LOST
    return flow.tell(taker, BY_PLACE, LOST)


def joined(flow: Flow, node: fx.Node) -> Rows:
    """Tensors behind each other have the rows that all of them have."""
    tensors: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
    tensors = [x for x in tensors if value_of(x).numel()] or tensors  # type: ignore[union-attr]
    dim = next(iter(dims_of(node, len(shape_of(tensors[0]))) or {0}))
    if [flow.single.get(x) for x in tensors] == [frozenset({row}) for row in range(flow.rows)]:
        inner, rest = divmod(shape_of(node)[dim], flow.rows)  # what a loop has made of each row
        return LOST if rest else each([Place(dim, 1, inner)])
    of_rows = [x for x in tensors if flow.has(x, Form.EACH)]
    if any(map(flow.is_sum, tensors)):
        return flow.tell(node, STATISTIC, LOST)
    if not of_rows or any(flow.has(x, Form.LOST) for x in tensors):
        return LOST
    units = [{(p.dim, p.inner / p.group) for p in flow.of[x].places} for x in of_rows]
    in_all = set.intersection(*units)
    places = [p for x in of_rows for p in flow.of[x].places if (p.dim, p.inner / p.group) in in_all]
    if packet_of(node) is aten.stack:
        places = [p.at(p.dim + (p.dim >= dim)) for p in places]
    elif len(of_rows) < len(tensors):
        places = [p for p in places if p.dim != dim]
    else:
        outer = sum(p.outer for x in of_rows for p in flow.of[x].places if p.dim == dim)
        places = [p._replace(outer=outer) if p.dim == dim else p for p in places]
    return each(places) if places else flow.lost(node)


def inserted(flow: Flow, node: fx.Node) -> Rows:
    """A part that is put into a value takes no rows of it away."""
    base, source = node_arg(node, 0), node_arg(node, 1)
    dim = next(iter(dims_of(node, len(shape_of(base))) or {0}))
    is_one = len(shape_of(source)) < len(shape_of(base))
    places = [
        *flow.of[base].places,
        *(p.at(p.dim + (is_one and p.dim >= dim)) for p in flow.of[source].places),
    ]
    if any(p.dim == dim for p in places) and not flow.is_single():
        places = [p for p in places if p.dim != dim]
        return each(places) if places else flow.lost(node, BY_PLACE)
    return each(places)


def repeated(flow: Flow, node: fx.Node) -> Rows:
    x = node_arg(node, 0)
    more = len(shape_of(node)) - len(shape_of(x))
    times: Sequence[int] = node.args[1]  # type: ignore[assignment]
    moved = (p.at(p.dim + more) for p in flow.of[x].places)
    return each(p._replace(outer=p.outer * times[p.dim]) for p in moved)


def padded(flow: Flow, node: fx.Node) -> Rows:
    pads: Any = argument(node, "pad")
    longer = {len(shape_of(node)) - 1 - k // 2 for k, pad in enumerate(pads) if pad}
    return flow.kept(node, node_arg(node, 0), lambda p: p.dim not in longer, BY_PLACE)


def strided(flow: Flow, node: fx.Node) -> Rows:
    """Other strides may keep those of the first dimension."""
    x = node_arg(node, 0)
    strides: Any = node.args[2]
    before: torch.Tensor = x.meta["val"]
    stays = shape_of(node)[:1] == before.shape[:1] and strides[0] == before.stride(0) and not node.args[3:]
    return flow.kept(node, x, lambda p: stays and p.dim == 0, UNKNOWN)


def diagonal(flow: Flow, node: fx.Node) -> Rows:
    """The diagonal of pairs of rows has each with itself."""
    x = node_arg(node, 0)
    dims: Any = {argument(node, name) % len(shape_of(x)) for name in ("dim1", "dim2")}  # type: ignore[operator]
    along = [p for p in flow.of[x].places if p.dim in dims]
    places = [p.at(without(p.dim, dims)) for p in flow.of[x].places if p.dim not in dims]
    if len(along) == 2 and along[0].at(0) == along[1].at(0):
        places.append(along[0].at(len(shape_of(node)) - 1))
    return each(places) if places else flow.lost(node)


def diagonals(flow: Flow, node: fx.Node) -> Rows:
    """A matrix for each vector, with that as its diagonal, keeps rows before these."""
    x, last = node_arg(node, 0), len(shape_of(node)) - 1
    dims: Any = {argument(node, name) % (last + 1) for name in ("dim1", "dim2")}  # type: ignore[operator]
    if dims != {last - 1, last}:
        return flow.lost(node)
    return flow.kept(node, x, lambda p: p.dim < last - 1)
