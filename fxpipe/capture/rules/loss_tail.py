"""The end of a forward: what the loss is a linear function of, and where it divides by counts of the data."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import PurePath

import torch
from torch import fx

from fxpipe.capture.rows.analysis import RowAnalysis, is_sum_of_lanes
from fxpipe.capture.rows.forms import Form, packet_of
from fxpipe.capture.rows.numbers import RowNumbers
from fxpipe.capture.rows.powers import RowPowers
from fxpipe.ir.builder import Calls, node_arg
from fxpipe.ir.dims import dims_of
from fxpipe.ir.graph import Kind, batch_mean
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.storage import argument, call_nodes, graph_outputs, leading_to, may_draw_numbers

aten = torch.ops.aten

LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
BACKWARDS = {aten.nll_loss_backward.default, aten.nll_loss2d_backward.default}
MEAN, SUM = 1, 2  # reductions
#: Ops that are linear in their first operand, where that is a number.
_LINEAR = {
    aten._to_copy, aten._unsafe_view, aten.alias, aten.clone, aten.expand, aten.mean, aten.nan_to_num,
    aten.neg, aten.permute, aten.reshape, aten.rsub, aten.select, aten.slice, aten.squeeze, aten.sum,
    aten.transpose, aten.unsqueeze, aten.view,
}  # fmt: skip
#: Ops that leave one number as it is.
_OF_ONE_NUMBER = {aten._to_copy, aten._unsafe_view, aten.expand, aten.reshape, aten.unsqueeze, aten.view}
#: Ops that make another number of a count and of fixed ones, as one that is never zero: of the whole batch's
#: count they make the whole batch's.
_OF_COUNTS = _OF_ONE_NUMBER | {
    aten.add, aten.clamp, aten.clamp_max, aten.clamp_min, aten.div, aten.eq, aten.ge, aten.gt, aten.le,
    aten.lt, aten.maximum, aten.minimum, aten.mul, aten.nan_to_num, aten.ne, aten.sub, aten.where,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Division:
    """A division of the loss.  ``node``: an op that divides by a count, or a mean cross-entropy, which does.
    ``backward``: the ops that differentiate it, each with the place of the count among its arguments.
    ``text``: the divisor.  ``counts``: the sums or means over rows of which that is made.  ``power``: 1 where
    they are sums, 0 where they are means; None where the divisor is one of them as it is.  ``totals``: see
    ``BatchMeans``; of a divisor that is made of them alone.
    """

    node: fx.Node
    backward: tuple[tuple[fx.Node, int], ...]
    text: str
    counts: tuple[fx.Node, ...] = ()
    power: float | None = None
    totals: frozenset[str] = frozenset()


class Tail:
    """The end of the forward: what the loss is a linear function of.

    ``linear``: its ops.  ``divisions``: the ops that divide by a count of data, which ends the way up.
    ``apart``: the texts of divisors that stay as they are, by the ops that divide.  ``odd``: those of them
    whose divisor comes from data alone.  ``totals``: see ``BatchMeans``.
    """

    def __init__(self, graph: fx.Graph, analysis: RowAnalysis) -> None:
        self.graph, self.calls, self._analysis = graph, Calls(graph), analysis
        self.rows = {node: rows for node, rows in analysis.of.items() if rows.is_data}
        self._same = _same_for_all(graph)
        self.linear: dict[fx.Node, None] = {}
        self.divisions: list[Division] = []
        self.apart: dict[fx.Node, str] = {}
        self.odd: list[fx.Node] = []
        self.totals = frozenset[str]()
        self._differentiate = defaultdict[int | None, list[fx.Node]](list)
        for node in call_nodes(graph):
            if node.meta["origin"].backward:
                self._differentiate[node.meta["origin"].seq].append(node)
        loss = graph_outputs(graph).loss
        todo = [] if loss is None else [loss]
        while todo:
            node = todo.pop()
            if node.op == "call_function" and node not in self.linear:
                self.linear[node] = None
                todo += self._operands(node)
        for item in (node for node in call_nodes(graph) if is_loss(node) and node not in self.linear):
            if node_arg(item, 0).args[3] == MEAN and self._backward(node_arg(item, 0), BACKWARDS, 6):
                self.apart[item] = f"the number of labels that count ({line_of(item)})"

    def _operands(self, node: fx.Node) -> Iterator[fx.Node]:
        """The operands in which an op is linear, but for those of a division by a count."""
        packet = packet_of(node)
        operands = [x for x in node.args if isinstance(x, fx.Node)]
        match packet:
            case None if is_loss(node):
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
        totals = frozenset[str]()
        if isinstance(divisor, fx.Node) and self._sums_rows(node):
            totals = self._totals(divisor)
        if not isinstance(divisor, fx.Node) or (not totals and self._is_factor(divisor)):
            yield from (x for x in node.args[:1] if isinstance(x, fx.Node) and x is not divisor)
            return
        backward = self._backward(node, (aten.div.Tensor,), 1)
        counts, text = () if totals else self._counts(divisor), f"{divisor.name} ({line_of(node)})"
        powers = {None} if totals or self._is_one_sum(divisor) else self._powers(counts)
        if len(powers) == 1 and not node.kwargs and (backward or not self._trains(node)):
            (power,) = powers
            self.divisions.append(Division(node, backward, text, counts, power, totals))
        elif divisor.meta["val"].numel() == 1:
            self.apart[node] = text
            if divisor in self.rows:
                self.odd.append(node)

    def _totals(self, node: fx.Node) -> frozenset[str]:
        """The leaves of which a value is made, if they are numbers of the batch, without rows: that of the
        labels of all microbatches, or any other, where a sum over rows is divided by it."""
        sources = [x for x in leading_to([node]) if not input_nodes(x)] if node in self._same else []

        def is_total(source: fx.Node) -> bool:
            if source.op != "placeholder" or source.meta["input"].kind is not Kind.BATCH:
                return False
            value: torch.Tensor = source.meta["val"]
            return not value.dim() and value.dtype is not torch.bool

        return (
            frozenset(x.meta["input"].name for x in sources) if all(map(is_total, sources)) else frozenset()
        )

    def _sums_rows(self, division: fx.Node) -> bool:
        """Whether what is divided is a sum over rows, as of the losses of all labels."""
        node = division.args[0]
        while isinstance(node, fx.Node):
            packet = packet_of(node)
            if packet is aten.sum:
                dims = dims_of(node, node_arg(node, 0).meta["val"].dim())
                return node not in self.rows and (dims is None or 0 in dims)
            if is_loss(node):
                return bool(node_arg(node, 0).args[3] == SUM)
            if node.op == "call_function" and argument(node, "reduction") == SUM:
                return node not in self.rows
            if packet not in _OF_ONE_NUMBER | {aten.neg, aten.mul}:
                return False
            node = node.args[0]
        return False

    def _has(self, node: object, form: Form) -> bool:
        """Whether a value of data has this form."""
        rows = self.rows.get(node)  # type: ignore[call-overload]
        return rows is not None and rows.is_whole and rows.form is form

    def _is_sum(self, node: fx.Node) -> bool:
        """Whether a value is a sum or a mean over rows of the data, and nothing more."""
        return self._has(node, Form.SUMMED) and self.rows[node].is_count

    def _is_one_sum(self, divisor: fx.Node) -> bool:
        """Whether a divisor is such a sum as it is, but for its shape and dtype."""
        while not self._is_sum(divisor) and packet_of(divisor) in _OF_ONE_NUMBER:
            divisor = node_arg(divisor, 0)
        return self._is_sum(divisor)

    def _counts(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The sums over rows of which a divisor is made, beside fixed numbers; none where it is made of
        anything else."""
        counts, seen, todo = dict[fx.Node, None](), set[fx.Node](), [node]
        while todo:
            part = todo.pop()
            if self._is_sum(part):
                counts[part] = None
            elif part not in seen:
                seen.add(part)
                inputs = [x for x in input_nodes(part) if not self.is_fixed(x)]
                if packet_of(part) not in _OF_COUNTS or not inputs:
                    return ()
                todo += inputs
        return tuple(counts)

    def is_fixed(self, node: fx.Node) -> bool:
        """Whether a value of data is the same for all rows."""
        return self._has(node, Form.SAME)

    def _powers(self, counts: Collection[fx.Node]) -> set[float]:
        """What powers of the number of rows the counts of a divisor have, as far as no number that follows
        from the rows gives them another one (``joins.py``)."""
        powers = RowPowers(self.graph, counts, self._analysis, {}, RowNumbers(self.graph, {})).of
        return {powers[count] for count in counts}

    def _add_cross_entropy(self, item: fx.Node) -> None:
        loss = node_arg(item, 0)
        labels, weight = node_arg(loss, 1), loss.args[2]
        if loss.args[3] != MEAN:
            return
        text = f"the number of labels that count ({line_of(loss)})"
        if weight is not None:
            text = f"the weights of labels that count ({line_of(loss)})"
        backward = self._backward(loss, BACKWARDS, 6)
        is_count = self._has(labels, Form.EACH) and (weight is None or self._has(weight, Form.SAME))
        if is_count and (backward or not self._trains(item)):
            self.divisions.append(Division(item, backward, text))
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
            for other in (() if seq is None else self._differentiate[seq])
            if other.target in targets and (targets is BACKWARDS or other.args[place] in self.rows)
        )


def is_loss(node: fx.Node) -> bool:
    """Whether a value is the loss that a cross-entropy gives, beside its count."""
    is_item = node.target is operator.getitem and node_arg(node, 0).target in LOSSES
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


def line_of(node: fx.Node) -> str:
    file, _, line = node.meta["origin"].source.rpartition(":")
    return f"{PurePath(file).name}:{line}" if line else node.meta["origin"].module
