"""Lets the divisors of a loss that count what its mean is over be means over the batch.

before: div(sum, count)                          each microbatch by its own count of labels
after:  div(sum, batch_mean(count))              all by the mean of their counts
before: nll_loss_forward(…, mean)
after:  div(nll_loss_forward(…, sum), batch_mean(sum(ne(labels, -100))))

So the mean over microbatches, which is what a step takes of losses and of gradients, is the loss of the whole
batch: (a / n + b / n) / 2 with n = (count of a + count of b) / 2.  The mean of each microbatch's own mean is
another loss wherever microbatches have different counts.

A divisor must be a sum or a mean over rows of the data (``rows/analysis.py``), and the loss a linear function
of what it divides; each term of a sum may have its own.  Where a sum over rows is divided by a number of the
batch, that is one of all microbatches, of which each has its share.  ``BatchMeans`` names those, and
those that stay, as do other functions of a sum over rows (``joins.py``).
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from torch import fx

from fxpipe.capture.rows.analysis import RowAnalysis, is_sum_of_lanes
from fxpipe.capture.rows.forms import SUMMED, Form
from fxpipe.capture.rules.joins import joins_of
from fxpipe.errors import number_of
from fxpipe.ir.builder import Calls, node_arg
from fxpipe.ir.dims import dims_of
from fxpipe.ir.graph import Kind, batch_mean
from fxpipe.ir.nodes import copy_node, input_nodes
from fxpipe.ir.storage import (
    argument,
    call_nodes,
    drop_dead,
    graph_outputs,
    leading_to,
    may_draw_numbers,
    set_outputs,
)
from fxpipe.plan.tensors import accum_dtype

aten = torch.ops.aten

_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
_BACKWARDS = {aten.nll_loss_backward.default, aten.nll_loss2d_backward.default}
_MEAN, _SUM = 1, 2  # reductions
#: Ops that are linear in their first operand, where that is a number.
_LINEAR = {
    aten._to_copy, aten._unsafe_view, aten.alias, aten.clone, aten.expand, aten.mean, aten.nan_to_num,
    aten.neg, aten.permute, aten.reshape, aten.rsub, aten.select, aten.slice, aten.squeeze, aten.sum,
    aten.transpose, aten.unsqueeze, aten.view,
}  # fmt: skip
#: Ops that leave one number as it is.
_OF_ONE_NUMBER = {aten._to_copy, aten._unsafe_view, aten.expand, aten.reshape, aten.unsqueeze, aten.view}
#: Of a count, what keeps it from being zero.
_GUARDS = {aten.clamp, aten.clamp_min, aten.maximum}
_MOST_NAMED = 3  # operands of an op in a warning
_LEAST = 2.0**-16  # of a guard, so that it is below each batch's mean of counts, and above zero in float16


@dataclass(frozen=True)
class BatchMeans:
    """What a loss takes of all rows, as text for ``explain``.  ``exact``: divisors that are means over the
    batch.  ``apart``: divisors, and functions of sums over rows, of which each microbatch has its own.
    ``has_total``: whether one of ``exact`` is a number of the batch for all of its microbatches."""

    exact: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    has_total: bool = False


NO_MEANS = BatchMeans()


def divide_by_batch_means(graph: fx.Graph, analysis: RowAnalysis, share: float) -> BatchMeans:
    """Rewrite a captured step, forward and backward, whose loss is no (sum, count).

    analysis: of that step.  share: of a microbatch in the batch, 1 / microbatches.
    """
    named = graph_outputs(graph)
    if named.loss is None or named.count is not None:
        return NO_MEANS
    tail = Tail(graph, named.loss, analysis)
    divides = {*tail.apart}
    joined = joins_of(analysis, graph, named.loss, {each.node for each in tail.divisions})
    joins, place = joined.ops, _place(joined.sums[0]) if joined.sums else ""
    tail.apart |= {node: _function(node) for node in joins if node not in divides}
    odd = next((node for node in tail.apart if node in tail.odd or joins.get(node)), None)
    if tail.divisions:
        divisions = [_as_division(tail, each) for each in tail.divisions]
        _keep_for_others(tail, {each.node for each in divisions})
        for each in divisions:
            _divide_by_mean(tail, each, share)
        drop_dead(graph)
    if odd is not None and share != 1:
        _warn_of_join(tail, odd, joins, is_divisor=odd in divides)
    elif place and share != 1:
        warnings.warn(
            f"The loss is a sum over rows that nothing divides by their number ({place}). A step has the "
            "mean of what its microbatches have: the sum over the whole batch, divided by the number of "
            "microbatches; so are its gradients. Divide by the rows that the loss gets, or let loss_fn "
            'return (sum, count); mean="microbatch" of compile says that it is meant.',
            stacklevel=2,
        )
    exact = dict.fromkeys(each.text for each in tail.divisions)
    return BatchMeans(tuple(exact), tuple(dict.fromkeys(tail.apart.values())), tail.has_total)


def _warn_of_join(tail: Tail, node: fx.Node, joins: Mapping[fx.Node, str], is_divisor: bool) -> None:
    """Warn of an op by which the loss is no mean of microbatches, and of how many others."""
    others = sum(x in tail.odd or x in joins for x in tail.apart) - 1
    verb, why, values, remedy = "takes", joins.get(node, ""), "has its own", ""
    if is_divisor:
        verb, values = "divides by", "has its own (NaN, of a mean over labels of which it has none)"
        why = "it is no sum over rows of the data, or divides inside a custom autograd.Function"
        remedy = "Take a loss that is a sum over rows, or let loss_fn return (sum, count); "
    more = f" {number_of(others, 'other op')} too: pipe.explain() lists them." if others else ""
    warnings.warn(
        f"The loss {verb} {tail.apart[node]}, of which fxpipe cannot take the whole batch's: {why}. Each "
        f"microbatch {values}, and the mean of their losses is another one than the whole batch's.{more} "
        f'{remedy}mean="microbatch" of compile says that it is meant.',
        stacklevel=3,
    )


@dataclass(frozen=True, eq=False)
class _Division:
    """A division of the loss.  ``node``: an op that divides by a count, or a mean cross-entropy, which does.
    ``backward``: the ops that differentiate it, each with the place of the count among its arguments.
    ``text``: the count."""

    node: fx.Node
    backward: tuple[tuple[fx.Node, int], ...]
    text: str


class Tail:
    """The end of the forward: what the loss is a linear function of.

    ``linear``: its ops.  ``divisions``: the ops that divide by a count of data, which ends the way up.
    ``apart``: the texts of divisors that stay as they are, by the ops that divide.  ``odd``: those of them
    whose divisor comes from data alone.  ``has_total``: see ``BatchMeans``.
    """

    def __init__(self, graph: fx.Graph, loss: fx.Node, analysis: RowAnalysis) -> None:
        self.graph, self.calls = graph, Calls(graph)
        self.rows = {node: rows for node, rows in analysis.of.items() if rows.is_data}
        self._same = _same_for_all(graph)
        self.linear: dict[fx.Node, None] = {}
        self.divisions: list[_Division] = []
        self.apart: dict[fx.Node, str] = {}
        self.odd: list[fx.Node] = []
        self.has_total = False
        todo = [loss]
        while todo:
            node = todo.pop()
            if node.op == "call_function" and node not in self.linear:
                self.linear[node] = None
                todo += self._operands(node)
        for item in (node for node in call_nodes(graph) if _is_loss(node) and node not in self.linear):
            if node_arg(item, 0).args[3] == _MEAN and self._backward(node_arg(item, 0), _BACKWARDS, 6):
                self.apart[item] = f"the number of labels that count ({_place(item)})"

    def _operands(self, node: fx.Node) -> Iterator[fx.Node]:
        """The operands in which an op is linear, but for those of a division by a count."""
        packet = getattr(node.target, "overloadpacket", None)
        operands = [x for x in node.args if isinstance(x, fx.Node)]
        match packet:
            case None if _is_loss(node):
                self._add_cross_entropy(node)
            case aten.div | aten.reciprocal:
                yield from self._divided(node)
            case aten.add | aten.sub:
                yield from operands
            case aten.mul:
                a, b = (*operands, None, None)[:2]
                yield from (x for x, other in ((a, b), (b, a)) if x is not None and self._scales(other, x))
            case aten.where if operands[0] in self.rows:
                yield from operands[1:]
            case aten.stack | aten.cat:
                yield from node.all_input_nodes
            case _ if packet in _LINEAR or is_sum_of_lanes(node):
                yield from operands[:1]

    def _scales(self, factor: fx.Node | None, node: fx.Node) -> bool:
        """Whether the product is linear in ``node``: of data also where the other one is not of data."""
        is_of_data = node in self.rows and factor not in self.rows
        return factor is None or is_of_data or self._is_factor(factor)

    def _is_factor(self, node: fx.Node) -> bool:
        """Whether a mean over microbatches may have such a factor: one that each row has for itself, or that
        is the same for all."""
        rows = self.rows.get(node)
        is_each = rows is not None and rows.is_whole and rows.form in (Form.EACH, Form.SAME)
        return is_each or node in self._same

    def _divided(self, node: fx.Node) -> Iterator[fx.Node]:
        divisor = node.args[-1]
        is_total = isinstance(divisor, fx.Node) and self.is_total(divisor) and self._sums_rows(node)
        if not isinstance(divisor, fx.Node) or (not is_total and self._is_factor(divisor)):
            yield from (x for x in node.args[:1] if isinstance(x, fx.Node) and x is not divisor)
            return
        backward = self._backward(node, (aten.div.Tensor,), 1)
        is_count = is_total or self._is_count(divisor)
        if is_count and not node.kwargs and (backward or not self._trains(node)):
            self.divisions.append(_Division(node, backward, f"{divisor.name} ({_place(node)})"))
        elif divisor.meta["val"].numel() == 1:
            self.apart[node] = f"{divisor.name} ({_place(node)})"
            if divisor in self.rows:
                self.odd.append(node)

    def is_total(self, node: fx.Node) -> bool:
        """Whether a value is a number of the batch, without rows: that of the labels of all microbatches, or
        any other, where a sum over rows is divided by it."""
        while getattr(node.target, "overloadpacket", None) in _OF_ONE_NUMBER:
            node = node_arg(node, 0)
        if node.op != "placeholder" or node.meta["input"].kind is not Kind.BATCH:
            return False
        value: torch.Tensor = node.meta["val"]
        return not value.dim() and value.dtype is not torch.bool

    def _sums_rows(self, division: fx.Node) -> bool:
        """Whether what is divided is a sum over rows, as of the losses of all labels."""
        node = division.args[0]
        while isinstance(node, fx.Node):
            packet = getattr(node.target, "overloadpacket", None)
            if packet is aten.sum:
                dims = dims_of(node, node_arg(node, 0).meta["val"].dim())
                return node not in self.rows and (dims is None or 0 in dims)
            if _is_loss(node):
                return bool(node_arg(node, 0).args[3] == _SUM)
            if node.op == "call_function" and argument(node, "reduction") == _SUM:
                return node not in self.rows
            if packet not in _OF_ONE_NUMBER | {aten.neg, aten.mul}:
                return False
            node = node.args[0]
        return False

    def _has(self, node: object, form: Form) -> bool:
        """Whether a value of data has this form."""
        rows = self.rows.get(node)  # type: ignore[call-overload]
        return rows is not None and rows.is_whole and rows.form is form

    def is_sum(self, node: fx.Node) -> bool:
        """Whether a value is a sum or a mean over rows of the data, and nothing more."""
        return self._has(node, Form.SUMMED) and self.rows[node].is_count

    def _is_count(self, node: fx.Node) -> bool:
        """Whether a value is a count of data, or one that is kept from being zero."""
        if node not in self.rows or self.is_sum(node):
            return node in self.rows
        packet = getattr(node.target, "overloadpacket", None)
        first, *others = [*node.args, None]
        if packet in _GUARDS and isinstance(first, fx.Node):
            least = others[0]
            is_fixed = isinstance(least, int | float) or (
                isinstance(least, fx.Node) and self._has(least, Form.SAME)
            )
            return is_fixed and others[1:] in ([], [None]) and self._is_count(first)
        return packet in _OF_ONE_NUMBER and isinstance(first, fx.Node) and self._is_count(first)

    def _add_cross_entropy(self, item: fx.Node) -> None:
        loss = node_arg(item, 0)
        labels, weight = node_arg(loss, 1), loss.args[2]
        if loss.args[3] != _MEAN:
            return
        text = f"the number of labels that count ({_place(loss)})"
        if weight is not None:
            text = f"the weights of labels that count ({_place(loss)})"
        backward = self._backward(loss, _BACKWARDS, 6)
        is_count = self._has(labels, Form.EACH) and (weight is None or self._has(weight, Form.SAME))
        if is_count and (backward or not self._trains(item)):
            self.divisions.append(_Division(item, backward, text))
        else:
            self.apart[item] = text
            if weight in self.rows and not self._has(weight, Form.SAME):
                self.odd.append(item)

    def _trains(self, node: fx.Node) -> bool:
        """Whether the step has to differentiate a division."""
        return node not in self.rows and bool(graph_outputs(self.graph).grads)

    def _backward(
        self, node: fx.Node, targets: Collection[object], place: int
    ) -> tuple[tuple[fx.Node, int], ...]:
        """The ops that differentiate another one, and read data at this place."""
        seq = node.meta["origin"].seq
        return tuple(
            (other, place)
            for other in call_nodes(self.graph)
            if seq is not None
            and other.target in targets
            and other.meta["origin"].backward
            and other.meta["origin"].seq == seq
            and (targets is _BACKWARDS or other.args[place] in self.rows)
        )


def _as_division(tail: Tail, division: _Division) -> _Division:
    """A mean cross-entropy as its sum, divided by the count of its labels."""
    item = division.node
    if not _is_loss(item):
        return division
    loss, call = node_arg(item, 0), partial(called, tail.calls, item)
    logs, labels, weight, _, ignored = loss.args
    loss.args = (logs, labels, weight, _SUM, ignored)
    before = [*item.users]
    with tail.graph.inserting_before(loss):
        count = counts = call(aten.ne.Scalar, labels, ignored)
        if weight is not None:
            weights = call(aten.index.Tensor, weight, [call(aten.mul.Tensor, labels, counts)])
            count = call(aten.mul.Tensor, weights, counts)
        count = call(aten.sum.default, count)
    tail.rows[count] = SUMMED
    with tail.graph.inserting_after(item):
        mean = call(aten.div.Tensor, item, count)
    for user in before:
        user.replace_input_with(item, mean)
    tail.linear[mean] = None
    return _Division(mean, division.backward, division.text)


def _keep_for_others(tail: Tail, divisions: Set[fx.Node]) -> None:
    """Let outputs, buffers and other ops of the forward have what microbatches divide by their own counts."""
    changed: dict[fx.Node, None] = {}
    for node in tail.graph.nodes:
        if node in divisions or (node in tail.linear and not changed.keys().isdisjoint(node.all_input_nodes)):
            changed[node] = None
    output = tail.graph.output_node()
    others = {
        node: [
            u for u in node.users if u not in changed and u is not output and not u.meta["origin"].backward
        ]
        for node in changed
    }
    named = graph_outputs(tail.graph)
    results = {*named.outputs.values(), *named.buffers.values()}
    needed = leading_to((n for n in changed if others[n] or n in results), changed.__contains__)
    copies: dict[fx.Node, fx.Node] = {}
    for node in changed:
        if node in needed:
            with tail.graph.inserting_after(node):
                copies[node] = copy_node(tail.graph, node, lambda n: copies.get(n, n))
            for user in others[node]:
                user.replace_input_with(node, copies[node])
    set_outputs(
        tail.graph,
        outputs={name: copies.get(node, node) for name, node in named.outputs.items()},
        buffers={name: copies.get(node, node) for name, node in named.buffers.items()},
    )


def _divide_by_mean(tail: Tail, division: _Division, share: float) -> None:
    node, call = division.node, partial(called, tail.calls, division.node)
    *before, divisor = node.args
    assert isinstance(divisor, fx.Node)
    dtype = node.meta["val"].dtype

    def cast(value: fx.Node, dtype: torch.dtype) -> fx.Node:
        return value if value.meta["val"].dtype == dtype else call(aten._to_copy.default, value, dtype=dtype)

    def mean_of(count: fx.Node) -> fx.Node:
        if tail.is_sum(count):
            return call(batch_mean, cast(count, accum_dtype(dtype)))
        if tail.is_total(count):
            tail.has_total = True
            return call(aten.mul.Tensor, call(batch_mean, cast(count, accum_dtype(dtype))), share)
        first, *others = count.args
        assert isinstance(first, fx.Node)
        value, packet = mean_of(first), count.target.overloadpacket  # type: ignore[union-attr]
        if packet is aten._to_copy:
            return value
        if packet in _GUARDS:
            least = others[0]
            scaled = call(aten.mul.Tensor, least, _LEAST) if isinstance(least, fx.Node) else least * _LEAST  # type: ignore
            others = [scaled]
        return call(count.target, value, *others)

    with tail.graph.inserting_before(node):
        mean = cast(mean_of(divisor), dtype)
    node.args = (*before, mean)
    for other, place in division.backward:
        other.args = (*other.args[:place], mean, *other.args[place + 1 :])


def called(calls: Calls, of: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new op, where the graph inserts, of another one's origin."""
    values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    val = target(*values, **named)
    return calls(target, args, kwargs, val=val, origin=of.meta["origin"])


def _is_loss(node: fx.Node) -> bool:
    """Whether a value is the loss that a cross-entropy gives, beside its count."""
    is_item = node.target is operator.getitem and node_arg(node, 0).target in _LOSSES
    return bool(is_item and node.args[1] == 0)


def _same_for_all(graph: fx.Graph) -> set[fx.Node]:
    """The values of parameters, constants, means over the batch, and numbers of the batch that all of its
    microbatches share."""
    changed = graph_outputs(graph).buffers
    same: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            source = node.meta["input"]
            has_rows = source.kind is Kind.BATCH and node.meta["val"].dim() > 0
            if not has_rows and source.kind is not Kind.KEY and source.name not in changed:
                same.add(node)
        elif node.target is batch_mean or (
            same.issuperset(input_nodes(node)) and not may_draw_numbers(node.target)
        ):
            same.add(node)
    return same


def _function(node: fx.Node) -> str:
    if node.target is operator.getitem:
        node = node_arg(node, 0)
    first, *others = [x.name for x in node.all_input_nodes]
    operands = ", ".join([first, *(others if len(others) < _MOST_NAMED else ["…"])])
    return f"{node.target.overloadpacket.__name__}({operands}) ({_place(node)})"  # type: ignore[union-attr]


def _place(node: fx.Node) -> str:
    file, _, line = node.meta["origin"].source.rpartition(":")
    return f"{PurePath(file).name}:{line}" if line else node.meta["origin"].module
