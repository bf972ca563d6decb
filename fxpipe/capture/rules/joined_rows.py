"""Finds where a loss is another function of the rows of a microbatch than a sum or a mean over them.

    mean(square(x - y))             a mean
    sqrt(mean(square(x - y)))       sqrt of a mean
    abs(cross_entropy - b) + b      abs of a mean
    mul(mean(a, 0), mean(b, 0))     a product of two means
    sub(x, mean(x))                 a number of all rows for each of them
    mean(topk(losses, 8))           a choice among the rows
    sum(softmax(losses, 0))         each row relative to the others
    x[: len(x) // 2]                some rows by their place (``row_places.py``)
    sum(square(x - y))              a sum that nothing divides by the number of rows

The mean of what the microbatches have of these is not what the whole batch has.  Batch norm and products of
all pairs of rows are not looked for.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from math import inf

import torch
from torch import fx

from fxpipe.capture.reads.row_sums import is_sum_of_lanes
from fxpipe.capture.rules.inner_gradients import uses_of_means
from fxpipe.capture.rules.row_places import RELATIVE, RowPlaces
from fxpipe.ir.builder import node_arg
from fxpipe.ir.compat import OpOverload
from fxpipe.ir.dims import COPIES, RESHAPES, TRANSPOSES, dims_of, is_pointwise, order_behind
from fxpipe.ir.graph import Kind
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.storage import argument, leading_to

aten = torch.ops.aten


class _Rows(Enum):
    """The rows of a microbatch in a value: none; a part for each, in its first dimension or in another one;
    their sum or mean; another function of all."""

    NONE, FIRST, OTHER, SUMMED, JOINED = range(5)


#: Ops that choose some of the rows, and others that are no sums over rows.
_CHOICES = {aten.kthvalue, aten.max, aten.median, aten.min, aten.mode, aten.nanmedian, aten.sort, aten.topk}
_NO_SUMS = _CHOICES | {
    aten.amax, aten.amin, aten.dist, aten.frobenius_norm, aten.linalg_vector_norm, aten.logsumexp, aten.norm,
    aten.nuclear_norm, aten.prod, aten.std, aten.std_mean, aten.var, aten.var_mean,
}  # fmt: skip
_SUMS = {aten.mean, aten.nansum, aten.sum}
#: Ops along dimensions that they name, whose results have as many rows, each made of several.
_BETWEEN = {
    aten._log_softmax, aten._softmax, aten.cummax, aten.cummin, aten.cumprod, aten.cumsum, aten.flip,
    aten.logcumsumexp, aten.roll,
}  # fmt: skip
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
#: Ops that count how often the rows have each number.
_COUNTS = {aten.bincount, aten.histc, aten.index_add, aten.index_put, aten.scatter_add}
#: Losses with a reduction of their own, and the number of that which adds up.
_LOSSES, _SUM = {aten.nll_loss_forward, aten.nll_loss2d_forward}, 2
#: The gradients of those, which take the number of labels for a mean alone (``inner_gradients.py``).
_OF_LABELS = {aten.nll_loss_backward, aten.nll_loss2d_backward}
#: Ops that take some of the numbers of a value, and others that put them elsewhere.
_PARTS = {aten.gather, aten.index, aten.select, aten.slice, aten.split, aten.unbind}
_PLACED = _PARTS | {
    aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits, aten.huber_loss, aten.index_add,
    aten.index_put, aten.l1_loss, aten.mse_loss, aten.scatter_add, aten.scatter_reduce, aten.smooth_l1_loss,
    aten.soft_margin_loss,
}  # fmt: skip


#: The reasons for warnings, as text.
FUNCTION = "it is another function of a sum over rows"
_CHOICE = "it chooses among the rows"
_STATISTIC = "it takes a number of all rows for each of them"
_FREQUENCY = "its gradient is divided by how often the rows have each word"


@dataclass(frozen=True)
class Joins:
    """``ops``: by which a loss is no sum over rows; and why that is to be said with a warning, "" if it is
    not: terms that balance or contrast the rows of a microbatch mean to.  ``sums``: over rows, that nothing
    divides by their number."""

    ops: dict[fx.Node, str]
    sums: tuple[fx.Node, ...]


def joins_of(graph: fx.Graph, loss: fx.Node, exact: Set[fx.Node], data: Container[fx.Node]) -> Joins:
    """What joins the rows of a microbatch in the loss of a captured step.

    exact: divisions that are made by a count of the whole batch.  data: what follows from the batch alone.
    """
    rows: dict[fx.Node, _Rows] = {}
    joins: dict[fx.Node, str] = {}
    places, moved = RowPlaces(graph), set[fx.Node]()
    told = places.joins | uses_of_means(graph, places)
    for node in graph.nodes:
        if node.op == "placeholder":
            is_batch = node.meta["input"].kind is Kind.BATCH and node.meta["val"].dim()
            rows[node] = _Rows.FIRST if is_batch else _Rows.NONE
        elif node.op == "call_function" and not node.meta["origin"].backward:
            rows[node] = rows[node_arg(node, 0)] if node in exact else _rows_of(node, rows)
            packet = getattr(node.target, "overloadpacket", None)
            states, of_all = _states(node, rows), {_Rows.SUMMED, _Rows.JOINED}
            if _Rows.JOINED not in states and (node in places.sums or (packet in _COUNTS and node in data)):
                rows[node] = _Rows.SUMMED
            if _is_moved(node, rows, moved):
                moved.add(node)
            if node.target is aten.embedding.default and argument(node, "scale_grad_by_freq"):
                joins[node] = _FREQUENCY
            elif node in told:
                joins[node] = told[node]
            elif node in exact:
                continue
            elif rows[node] is _Rows.JOINED and _Rows.JOINED not in states:
                is_function = _is_one_number(node, rows) or _compares(node, rows, data, places.sums)
                joins[node] = _CHOICE if packet in _CHOICES else FUNCTION if is_function else ""
            elif _is_between(node, rows):
                joins[node] = RELATIVE if node in data or node.meta["val"].dim() == 1 else ""
            elif states & {_Rows.FIRST, _Rows.OTHER} and states & of_all and packet not in _OF_LABELS:
                numbers = [x for x in input_nodes(node) if rows.get(x) in of_all]
                if all(x.meta["val"].is_floating_point() for x in numbers):  # no length or position
                    is_told = all(x in data or x in moved or _is_mean(x) for x in numbers)
                    joins[node] = _STATISTIC if is_told else ""
    behind, todo = set[fx.Node](), [loss]
    while todo:
        node = todo.pop()
        if node not in behind:
            behind.add(node)
            todo += [node_arg(node, 0)] if node in exact else node.all_input_nodes
    ops = {node: why for node, why in joins.items() if node in behind}
    return Joins(ops, tuple(_undivided_sums(loss, rows, exact, places.sums)))


def _is_moved(node: fx.Node, rows: Mapping[fx.Node, _Rows], moved: Container[fx.Node]) -> bool:
    """Whether a value is a parameter plus a number of all rows, as an update within the forward makes it."""
    packet = getattr(node.target, "overloadpacket", None)
    operands = [*input_nodes(node)]
    if packet in TRANSPOSES | RESHAPES | COPIES:
        return operands[0] in moved
    is_parameter = [x in moved or _is_parameter(x) for x in operands]
    is_sum = packet in (aten.add, aten.addcdiv, aten.addcmul, aten.lerp, aten.sub)
    return is_sum and any(is_parameter) and rows[node] in (_Rows.SUMMED, _Rows.JOINED)


def _is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["input"].kind is Kind.PARAMETER


def _is_mean(node: fx.Node) -> bool:
    """Whether a number is one of all rows, such as their mean, and no part of a vector of several."""
    while getattr(node.target, "overloadpacket", None) in COPIES | RESHAPES | {aten.expand}:
        node = node_arg(node, 0)
    return node.meta["val"].numel() == 1 and not _is_share(node)


def _compares(
    node: fx.Node, rows: Mapping[fx.Node, _Rows], data: Container[fx.Node], products: Container[fx.Node]
) -> bool:
    """Whether an op takes numbers of all rows in which the model's output meets the data other than by a
    factor, as an error of each feature does and what balances the rows does not.  products: as below."""
    for item in (i for x in input_nodes(node) if rows.get(x) is _Rows.SUMMED for i in _summed(x, products)):
        packet = getattr(item.target, "overloadpacket", None)
        is_factor = packet in _PRODUCTS or packet in (aten.div, aten.where, aten.masked_fill)
        if item.op == "call_function" and not is_factor:
            operands = [x for x in input_nodes(item) if rows.get(x) is not _Rows.NONE]
            if len({x in data for x in operands}) == 2:
                return True
    return False


def _undivided_sums(
    loss: fx.Node, rows: Mapping[fx.Node, _Rows], exact: Set[fx.Node], products: Container[fx.Node]
) -> Iterator[fx.Node]:
    """The sums over rows that the loss adds as they are, or times a number that is no part of a count.

    products: of matrices that are sums over rows.
    """
    todo, seen = [loss], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in exact or node in seen or rows.get(node) is not _Rows.SUMMED:
            continue
        seen.add(node)
        packet = getattr(node.target, "overloadpacket", None)
        operands = [*input_nodes(node)]
        states = {rows.get(x) for x in operands}
        if packet is None:  # an item: what a cross-entropy gives
            if argument(operands[0], "reduction") == _SUM:
                yield node
        elif states & {_Rows.FIRST, _Rows.OTHER}:
            is_sum = packet in (aten.dot, aten.sum) or argument(node, "reduction") == _SUM
            is_sum = (is_sum and _Rows.FIRST in states) or node in products
            if is_sum and exact.isdisjoint(_summed(node)):
                yield node
        elif packet in (aten.div, aten.mul):
            numbers = [x for x in node.args if x not in operands]
            of_rows = [x for x in operands if rows.get(x) is _Rows.SUMMED]
            is_number = len(operands) == len(numbers) == 1 and isinstance(numbers[0], int | float)
            is_count = is_number and _is_part_of_a_count(packet, float(numbers[0]), of_rows[0])  # type: ignore
            is_factor = is_number or any(_is_factor(x) for x in operands if rows.get(x) is _Rows.NONE)
            todo += of_rows if is_factor and not is_count else []
        elif packet in _LINEAR:
            todo += operands


def _is_factor(node: fx.Node) -> bool:
    """Whether a number comes from parameters or from the batch, and is no count that the model computes."""
    inputs = (x.meta["input"].kind for x in leading_to([node]) if x.op == "placeholder")
    return any(kind in (Kind.PARAMETER, Kind.BATCH) for kind in inputs)


def _is_part_of_a_count(packet: object, number: float, node: fx.Node) -> bool:
    """Whether a number divides what is summed by how many these are: 1 / 6 or 1 / 12, of 6 rows of 2; a half
    is that of a squared error."""
    if number == 0:
        return True  # nothing is left of the sum
    count = number if packet is aten.div else 1 / number
    if number == 0.5 or not 1 <= count < inf or abs(count - round(count)) > 1e-6 * count:
        return False
    values = (x.meta["val"] for x in _summed(node))
    shapes = [x.shape for x in values if isinstance(x, torch.Tensor) and x.dim() and x.numel()]
    return any(s.numel() % round(count) == 0 and round(count) % s[0] == 0 for s in shapes)


def _summed(node: fx.Node, products: Container[fx.Node] = ()) -> set[fx.Node]:
    """What is summed: the values from which a sum, or a product that is one, is made entry by entry."""
    todo, seen = [node], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            packet = getattr(node.target, "overloadpacket", None)
            is_sum = packet in _LINEAR | _LOSSES | _PLACED or node in products
            if is_pointwise(node) or packet is None or is_sum:
                todo += node.all_input_nodes
    return seen


def _is_between(node: fx.Node, rows: Mapping[fx.Node, _Rows]) -> bool:
    """Whether an op makes each row of several; of integers, an order or a place."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in _BETWEEN or rows[node_arg(node, 0)] is not _Rows.FIRST:
        return False
    is_order = packet not in (aten.flip, aten.roll) and not node_arg(node, 0).meta["val"].is_floating_point()
    dims = dims_of(node, node_arg(node, 0).meta["val"].dim())
    return not is_order and (dims is None or 0 in dims)


def _is_one_number(node: fx.Node, rows: Mapping[fx.Node, _Rows]) -> bool:
    """Whether an op takes one number, as a loss is, a stack of some, or all rows, and gives one."""
    operands = [x for x in input_nodes(node) if rows.get(x) is _Rows.SUMMED]
    of_losses = any(map(_is_stack_of_losses, operands))
    values = [x.meta["val"] for x in operands if not _is_stack_of_losses(x)]
    values += [] if of_losses else [node.meta["val"]]
    is_one = all(isinstance(x, torch.Tensor) and x.numel() == 1 for x in values)
    is_product = getattr(node.target, "overloadpacket", None) in _PRODUCTS
    return is_one and not (is_product and any(map(_is_share, operands)))


def _is_stack_of_losses(node: fx.Node) -> bool:
    losses = node.all_input_nodes
    is_stack = getattr(node.target, "overloadpacket", None) in (aten.cat, aten.stack)
    return is_stack and not any(x.meta["val"].numel() > 1 or _is_share(x) for x in losses)


def _is_share(node: fx.Node) -> bool:
    """Whether a number is one of several, or how many rows are chosen, as those of one expert."""
    while node.op == "call_function" and not node.meta["origin"].backward:
        packet = getattr(node.target, "overloadpacket", None)
        operand = next(iter(node.all_input_nodes), None)
        if operand is None or packet in _PRODUCTS or packet in (aten.add, aten.sub):
            return False
        if packet is None:
            return getattr(operand.target, "overloadpacket", None) not in _LOSSES
        is_part = packet in _PARTS and operand.meta["val"].numel() > node.meta["val"].numel()
        if is_part or not operand.meta["val"].is_floating_point():
            return True
        node = operand
    return False


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
