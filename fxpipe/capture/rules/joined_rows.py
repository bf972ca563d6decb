"""Finds where a loss is another function of the rows of a microbatch than a sum or a mean over them.

    mean(square(x - y))             a mean
    sqrt(mean(square(x - y)))       sqrt of a mean
    abs(cross_entropy - b) + b      abs of a mean
    mul(mean(a, 0), mean(b, 0))     a product of two means
    sub(x, mean(x))                 a number of all rows for each of them
    mean(topk(losses, 8))           a choice among the rows

The mean of what the microbatches have of these is not what the whole batch has.  Batch norm and products of
all pairs of rows are not looked for.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from enum import Enum

import torch
from torch import fx

from fxpipe.capture.reads.row_sums import is_sum_of_lanes
from fxpipe.ir.builder import node_arg
from fxpipe.ir.compat import OpOverload
from fxpipe.ir.dims import RESHAPES, TRANSPOSES, dims_of, order_behind
from fxpipe.ir.graph import Kind
from fxpipe.ir.nodes import input_nodes

aten = torch.ops.aten


class _Rows(Enum):
    """The rows of a microbatch in a value: none; a part for each, in its first dimension or in another one;
    their sum or mean; another function of all."""

    NONE, FIRST, OTHER, SUMMED, JOINED = range(5)


#: Ops that choose some of the rows, and others that are no sums over rows.
_CHOICES = {aten.kthvalue, aten.max, aten.median, aten.min, aten.mode, aten.nanmedian, aten.sort, aten.topk}
_NO_SUMS = _CHOICES | {
    aten.amax, aten.amin, aten.frobenius_norm, aten.linalg_vector_norm, aten.logsumexp, aten.norm,
    aten.nuclear_norm, aten.prod, aten.std, aten.std_mean, aten.var, aten.var_mean,
}  # fmt: skip
_SUMS = {aten.mean, aten.nansum, aten.sum}
#: Ops whose results are no numbers that an operand has.
_NO_NUMBERS = {
    aten.empty_like, aten.full_like, aten.isfinite, aten.isinf, aten.isnan, aten.new_full, aten.new_ones,
    aten.new_zeros, aten.ones_like, aten.zeros_like,
}  # fmt: skip
#: Ops that are linear in all of their operands together, and those that are in any one of them.
_LINEAR = _SUMS | {
    aten._to_copy, aten._unsafe_view, aten.add, aten.alias, aten.cat, aten.clone, aten.detach, aten.expand,
    aten.masked_fill, aten.nan_to_num, aten.neg, aten.permute, aten.reshape, aten.rsub, aten.select,
    aten.slice, aten.split, aten.split_with_sizes, aten.squeeze, aten.stack, aten.sub, aten.t,
    aten.transpose, aten.unbind, aten.unsqueeze, aten.view, aten.where,
}  # fmt: skip
_PRODUCTS = {aten.bmm, aten.dot, aten.mm, aten.mul, aten.mv}


#: The reasons for warnings, as text.
FUNCTION = "it is another function of a sum over rows"
_CHOICE = "it chooses among the rows"
_STATISTIC = "it takes a number of all rows for each of them"


def joining_ops(
    graph: fx.Graph, loss: fx.Node, exact: Collection[fx.Node], data: Container[fx.Node]
) -> dict[fx.Node, str]:
    """The ops of a captured step by which its loss is no sum over rows; and why that is to be said with a
    warning, "" if it is not: terms that balance or contrast the rows of a microbatch mean to.

    exact: divisions that are made by a count of the whole batch.  data: what follows from the batch alone.
    """
    rows: dict[fx.Node, _Rows] = {}
    joins: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            is_batch = node.meta["input"].kind is Kind.BATCH and node.meta["val"].dim()
            rows[node] = _Rows.FIRST if is_batch else _Rows.NONE
        elif node.op == "call_function" and not node.meta["origin"].backward:
            rows[node] = rows[node_arg(node, 0)] if node in exact else _rows_of(node, rows)
            states, of_all = _states(node, rows), {_Rows.SUMMED, _Rows.JOINED}
            if node in exact:
                continue
            if rows[node] is _Rows.JOINED and _Rows.JOINED not in states:
                packet = getattr(node.target, "overloadpacket", None)
                is_one = _is_one_number(node, rows)
                joins[node] = _CHOICE if packet in _CHOICES else FUNCTION if is_one else ""
            elif rows[node] in (_Rows.FIRST, _Rows.OTHER) and states & of_all:
                numbers = [x for x in input_nodes(node) if rows.get(x) in of_all]
                if all(x.meta["val"].is_floating_point() for x in numbers):  # no length or position
                    joins[node] = _STATISTIC if all(x in data for x in numbers) else ""
    behind, todo = set[fx.Node](), [loss]
    while todo:
        node = todo.pop()
        if node not in behind:
            behind.add(node)
            todo += [node_arg(node, 0)] if node in exact else node.all_input_nodes
    return {node: why for node, why in joins.items() if node in behind}


def _is_one_number(node: fx.Node, rows: Mapping[fx.Node, _Rows]) -> bool:
    """Whether an op takes one number, as a loss is, or all rows, and gives one."""
    values = [node.meta["val"], *(x.meta["val"] for x in input_nodes(node) if rows.get(x) is _Rows.SUMMED)]
    is_one = all(isinstance(x, torch.Tensor) and x.numel() == 1 for x in values)
    return is_one and getattr(node.target, "overloadpacket", None) not in _PRODUCTS


def _states(node: fx.Node, rows: Mapping[fx.Node, _Rows]) -> set[_Rows]:
    return {rows.get(x, _Rows.OTHER) for x in input_nodes(node)}


def _rows_of(node: fx.Node, rows: Mapping[fx.Node, _Rows]) -> _Rows:
    """The rows in the result of an op."""
    states = _states(node, rows)
    packet = getattr(node.target, "overloadpacket", None)
    if states <= {_Rows.NONE} or packet in _NO_NUMBERS:
        return _Rows.NONE
    if not isinstance(node.target, OpOverload):
        return next(iter(states)) if len(states) == 1 else _Rows.OTHER  # an item of several results
    if states & {_Rows.FIRST, _Rows.OTHER}:
        return _of_rows(node, rows)
    if _Rows.JOINED in states:
        return _Rows.JOINED
    summed = [rows[x] is _Rows.SUMMED for x in node.args if isinstance(x, fx.Node)]
    is_linear = packet in _LINEAR or (packet in _PRODUCTS and sum(summed) == 1)
    is_linear |= is_sum_of_lanes(node)
    is_linear |= packet is aten.div and summed[:1] == [True] and not any(summed[1:])
    return _Rows.SUMMED if is_linear else _Rows.JOINED


def _of_rows(node: fx.Node, rows: Mapping[fx.Node, _Rows]) -> _Rows:
    """The rows in the result of an op on values with a part for each row."""
    packet, value = node.target.overloadpacket, node.meta["val"]  # type: ignore[union-attr]
    operands = [x.meta["val"] for x in input_nodes(node) if rows.get(x) is _Rows.FIRST]
    if not isinstance(value, torch.Tensor):  # of several results: a loss has its first
        value = next((x for x in value if isinstance(x, torch.Tensor)), None)
    if value is None or not all(isinstance(x, torch.Tensor) for x in operands):
        return _Rows.OTHER
    if packet in _CHOICES and not value.is_floating_point():
        return _Rows.OTHER  # an order of rows, as experts sort theirs
    dims = dims_of(node, operands[0].dim()) if operands and packet in _SUMS | _NO_SUMS else set()
    if not value.dim() or dims is None or 0 in dims:
        return _Rows.JOINED if packet in _NO_SUMS else _Rows.SUMMED
    moves = packet in TRANSPOSES and order_behind(node)[0] != 0
    stays = any(packet in RESHAPES or x.shape[0] == value.shape[0] for x in operands)
    return _Rows.FIRST if stays and not moves else _Rows.OTHER
