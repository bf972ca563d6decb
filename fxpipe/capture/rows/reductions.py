"""The rows behind ops on entries at the same place, along dimensions, and over them."""

from __future__ import annotations

import re

import torch
from torch import fx

from fxpipe.capture.rows import families
from fxpipe.capture.rows.flow import Flow, is_number
from fxpipe.capture.rows.forms import (
    BY_PLACE,
    CHOICE,
    FUNCTION,
    LOST,
    RELATIVE,
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
from fxpipe.capture.rows.place import without
from fxpipe.ir.builder import node_arg
from fxpipe.ir.dims import COPIES, SUMS, TRANSPOSES, dims_of
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.storage import argument

aten = torch.ops.aten

#: The reductions of losses.
_SUMMING = 1, 2
_OF_SUMS = families.SHAPES | TRANSPOSES | families.PARTS | families.JOINED | SUMS | families.LINEAR | {
    aten.constant_pad_nd, aten.diagonal, aten.flip, aten.repeat, aten.roll, aten.unfold,
}  # fmt: skip
#: Of ops whose other operands have no entries at the same place.
_OPERANDS = {aten.copy: slice(1, 2), aten.masked_scatter: slice(2)}
_COMPARISONS = {aten.ge, aten.gt, aten.le, aten.lt}
_ADDITIONS = {aten.add, aten.rsub, aten.sub}
_AFFINE = _ADDITIONS | COPIES | families.SHAPES | TRANSPOSES | {aten.expand, aten.mean, aten.neg}


def of_sums(flow: Flow, node: fx.Node) -> Rows:
    """An op on sums over rows, and on values that are the same for all, is told unless it is linear."""
    packet = packet_of(node)
    summed = [flow.has(x, Form.SUMMED) for x in node.args]
    first, second = [*summed, False, False][:2]
    is_count = all(flow.of[x].is_count for x in input_nodes(node) if flow.has(x, Form.SUMMED))
    is_linear = packet in _OF_SUMS
    match packet:
        case aten.add | aten.sub | aten.rsub:
            is_rest = packet is not aten.add and (second if packet is aten.rsub else first)
            is_count &= (first and second) or is_rest
        case aten.mul:
            is_linear = first != second
        case aten.div:
            is_linear = first and not second and not node.kwargs
        case aten.where | aten.masked_fill:
            is_linear = not (first if packet is aten.where else second)
        case aten.index | aten.gather | aten.index_select:
            others = [x for x in input_nodes(node) if x is not node.args[0]]
            is_linear = first and not any(flow.has(x, Form.SUMMED) for x in others)
        case aten._to_copy:
            is_linear = is_float(node) or not is_float(node_arg(node, 0))
        case _ if packet in families.PRODUCTS:
            start = families.PRODUCTS[packet]
            is_linear = sum(summed[start : start + 2]) <= 1
    if is_linear:
        return Rows(Form.SUMMED, is_count=is_count)
    sums = [x for x in input_nodes(node) if flow.is_sum(x) and packet_of(x) not in families.COUNTS]
    if not is_float(node) and not sums:
        return LOST  # integers of counts
    return flow.tell(node, CHOICE if packet in families.CHOICES | families.ORDERS else FUNCTION, SUMMED)


def pointwise(flow: Flow, node: fx.Node) -> Rows:
    """Ops on entries at the same place keep the rows; a loss of these may add them up."""
    packet = packet_of(node)
    operands = [*input_nodes(node)]
    if packet in _OPERANDS:
        operands = [x for x in node.args[_OPERANDS[packet]] if isinstance(x, fx.Node)]
    is_sum = argument(node, "reduction") in _SUMMING
    dims = max(len(shape_of(x)) for x in operands) if is_sum else len(shape_of(node))
    # Beside rows, what is lost from sight is another part of them, as what experts add to what they sort.
    rows = LOST if any(x in flow.single for x in operands) else each(flow.aligned(operands, dims))
    result = flow.total(operands) if is_sum else rows
    if any(map(flow.is_sum, operands)):
        others = [x for x in operands if not flow.is_sum(x)]
        if packet in _ADDITIONS and rows.form is Form.EACH:
            return rows._replace(plus=node)
        if packet in _ADDITIONS and others and all(x in flow.single for x in others):
            return LOST  # the sum of rows that were taken one by one goes on from it
        return flow.tell(node, STATISTIC, result)
    of_several = [x for x in operands if flow.has(x, Form.SUMMED) or flow.has(x, Form.LOST)]
    if not is_float(node):
        is_by_order = packet in _COMPARISONS and any(flow.of[x].is_order for x in of_several)
        if is_by_order and len(of_several) == 1:  # what came first is beside a number that is no row's
            return flow.tell(node, CHOICE, LOST)
        return LOST if of_several else result
    if any(is_integer(x) for x in of_several):
        is_counted = packet is aten._to_copy and all(packet_of(x) in families.COUNTS for x in node.users)
        return LOST if is_counted else flow.tell(node, STATISTIC, result)
    same = [(x, dims - len(shape_of(x))) for x in operands if flow.has(x, Form.SAME)]
    if any(flow.differs(x, p.at(p.dim - shift)) for x, shift in same for p in rows.places):
        return flow.tell(node, BY_PLACE, result)
    return result


def is_integer(x: fx.Node) -> bool:
    value = value_of(x)
    return value is not None and not is_float(x) and value.dtype is not torch.bool


def is_affine(flow: Flow, node: fx.Node) -> bool:
    """Whether an op that takes each row by itself, or their mean, takes a number that was added to all of
    them to one that is added to all of its results."""
    packet = packet_of(node)
    if packet in (aten.div, aten.mul):
        others = [x for x in node.args[:2] if isinstance(x, fx.Node) and not flow.has(x, Form.SAME)]
        return len(others) == 1 and (packet is aten.mul or others[0] is node.args[0])
    return packet in _AFFINE


def reduced(flow: Flow, node: fx.Node) -> Rows:
    x, packet = node_arg(node, 0), packet_of(node)
    rows, named = flow.of[x], dims_of(node, len(shape_of(x)))
    stay = []
    if rows.form is Form.EACH:
        gone = [p for p in rows.places if named is None or p.dim in named]
        keeps = named is None or len(shape_of(node)) == len(shape_of(x))
        stay = [p.at(without(p.dim, () if keeps else named)) for p in rows.places if p not in gone]  # type: ignore
        if not gone:
            return each(stay)
    elif not is_number(node) or x in flow.single:
        return LOST
    if packet not in SUMS and not is_float(node):
        return flow.tell(node, CHOICE, LOST) if packet in families.CHOICES and is_float(x) else LOST
    if stay:
        return flow.tell(node, RELATIVE, each(stay))
    if len(rows.places) > 1:  # pairs of rows
        return flow.tell(node, RELATIVE, SUMMED)
    if packet in SUMS:
        return SUMMED
    return flow.tell(node, CHOICE if packet in families.CHOICES else FUNCTION, SUMMED)


def counts(flow: Flow, node: fx.Node) -> Rows:
    """How often entries have each number, or a sum by these, is a sum over rows."""
    return flow.total(input_nodes(node))


def along(flow: Flow, node: fx.Node) -> Rows:
    """An op that makes the entries along some dimensions of each other keeps rows along the others."""
    x, packet = node_arg(node, 0), packet_of(node)
    named = dims_of(node, len(shape_of(x)))
    if packet is aten.unfold:
        named = {argument(node, "dimension") % len(shape_of(x))}  # type: ignore[operator]
    is_of_rows = any(named is None or p.dim in named for p in flow.of[x].places)
    if is_of_rows and not is_float(x) and packet not in families.MOVES:
        return LOST._replace(is_order=packet is aten.cumsum)
    if is_of_rows and packet in families.ORDERS:
        return flow.lost(node, CHOICE)
    return flow.kept(node, x, lambda p: named is not None and p.dim not in named)


def leading(flow: Flow, node: fx.Node) -> Rows:
    """An op that takes each entry of the first dimension by itself keeps rows there."""
    pairs = packet_of(node) in families.PAIRS
    return flow.kept(node, node_arg(node, 0), lambda p: p.dim == 0, pairs=pairs)


def spatial(flow: Flow, node: fx.Node) -> Rows:
    """An op on images, or what has more or fewer dimensions than these, keeps rows before them."""
    along = int(re.findall(r"(\d)d", packet_of(node).__name__)[-1])
    x = node_arg(node, 0)
    return flow.kept(node, x, lambda p: p.dim < len(shape_of(x)) - along)


def batch_norm(flow: Flow, node: fx.Node) -> Rows:
    """A batch norm takes numbers of all rows for each channel, in training."""
    if argument(node, "training", True) is False:
        return leading(flow, node)
    return flow.kept(node, node_arg(node, 0), lambda p: p.dim == 1, STATISTIC)


def norm(flow: Flow, node: fx.Node) -> Rows:
    """A norm along the last dimensions keeps rows before these."""
    last = len(shape_of(node)) - len(node.args[1])  # type: ignore[arg-type]
    return flow.kept(node, node_arg(node, 0), lambda p: p.dim < last)


def of_matrices(flow: Flow, node: fx.Node) -> Rows:
    """An op on the matrices in the last two dimensions keeps rows before these."""
    x = node_arg(node, 0)
    return flow.kept(node, x, lambda p: p.dim < len(shape_of(x)) - 2, pairs=True)


def solved(flow: Flow, node: fx.Node) -> Rows:
    """A system of equations keeps rows among its right-hand sides, if all have the same matrix."""
    a, b = (node_arg(node, i) for i in range(2))
    last = len(shape_of(b)) - 1
    if not flow.has(a, Form.SAME) or argument(node, "left", True) is False:
        return of_matrices(flow, node)
    return flow.kept(node, b, lambda p: p.dim != last - 1)


def triangle(flow: Flow, node: fx.Node) -> Rows:
    """What is left of a matrix above or below its diagonal goes by the place in the last two dimensions."""
    x = node_arg(node, 0)
    return flow.kept(node, x, lambda p: p.dim < len(shape_of(x)) - 2, BY_PLACE)


def cross_entropy(flow: Flow, node: fx.Node) -> Rows:
    """A cross-entropy of logs [rows, words, …] has a loss for each label, or their sum."""
    logs, labels = node_arg(node, 0), node_arg(node, 1)
    is_sum = argument(node, "reduction") in _SUMMING
    rows = flow.of[logs] if flow.has(labels, Form.SAME) else flow.of[labels]
    rows = flow.total([logs, labels]) if is_sum else Rows(rows.form, rows.places)
    return flow.tell(node, STATISTIC, rows) if flow.has(node.args[2], Form.SUMMED) else rows


def alignments(flow: Flow, node: fx.Node) -> Rows:
    """Alignments have a loss of each row, from logs [length, rows, words]."""
    logs, labels = flow.of[node_arg(node, 0)], flow.of[node_arg(node, 1)]
    if Form.LOST in (logs.form, labels.form):
        return LOST
    places = {p.at(0) for p in logs.places if p.dim == 1}
    is_apart = {p.dim for p in logs.places} <= {1} and {*labels.places} <= places
    return each(places) if places and is_apart else flow.lost(node, RELATIVE)


def gradient(flow: Flow, node: fx.Node) -> Rows:
    """An op's gradient within the forward has the rows of its operand; a parameter's is a sum over rows."""
    shape = shape_of(node)
    places = [p for x in input_nodes(node) if shape_of(x) == shape for p in flow.of[x].places]
    return each(places) if places else SUMMED
