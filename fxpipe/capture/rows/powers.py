"""The powers of the number of rows in the values of a forward: of which a step's mean has none.

    mean(x), sum(x) / len(x)            0: the mean of what microbatches have is what the batch has
    sum(x), mean(x) * len(x)            1: the batch has as many times more as it has microbatches
    autograd.grad(mean(f(x)), x)        -1 in each row: the gradient of a mean is divided by their number
    g.sign(), g / g.norm(dim=1)         0 again
    x + 0.1 * g                         none: told, as what is another function of a power

The powers in numbers and constants come from a trace of twice the rows (``numbers.py``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from fxpipe.capture.rows import families
from fxpipe.capture.rows.flow import Flow
from fxpipe.capture.rows.forms import Form, is_float, packet_of, shape_of, value_of
from fxpipe.capture.rows.numbers import RowNumbers, numbers_of
from fxpipe.ir.builder import node_arg
from fxpipe.ir.dims import COPIES, SUMS
from fxpipe.ir.graph import Kind
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.storage import argument, leading_to

aten = torch.ops.aten

_MEAN, _SUM = 1, 2  # of the reductions of losses
#: A number that is added to a value, so that nothing is divided by zero, is at most this.
_LEAST = 1e-3
_SIGNS = {aten.argmax, aten.argmin, aten.sgn, aten.sign} | families.NO_NUMBERS
_PRODUCTS = families.PRODUCTS | {aten.mul: 0}
_FILLS = {aten.fill, aten.full, aten.full_like, aten.new_full, aten.scalar_tensor}
_ZEROS = {aten.new_zeros, aten.zeros, aten.zeros_like}
_ROOTS = {aten.reciprocal: -1.0, aten.rsqrt: -0.5, aten.sqrt: 0.5}
_GUARDS = {aten.clamp, aten.clamp_max, aten.clamp_min, aten.maximum, aten.minimum}
#: Ops whose result has the power of their operands, if these have the same one.
_ALIKE = (
    COPIES | families.SHAPES | families.PARTS | families.JOINED | families.INSERTED | families.PLACED
    | families.LINEAR | families.CHOICES | families.ORDERS | families.MOVES | SUMS
    | {
        aten._log_softmax_backward_data, aten.abs, aten.amax, aten.amin, aten.constant_pad_nd, aten.cumsum,
        aten.diagonal, aten.gather, aten.index, aten.index_select, aten.l1_loss, aten.linalg_vector_norm,
        aten.nll_loss2d_forward, aten.nll_loss_forward, aten.permute, aten.relu, aten.repeat, aten.t,
        aten.transpose,
    }
)  # fmt: skip
_ADDING = families.ADDED | {
    aten._embedding_bag, aten.bincount, aten.count_nonzero, aten.histc, aten.nansum, aten.sum,
}  # fmt: skip


class RowPowers:
    """``of``: the power in each value that leads to the loss.  ``odd``: the ops whose results have none.

    flow: what the values are of the rows.  exact: divisions by what the whole batch has, each with the sums
    or means over rows of which that is made; none of a number of the batch.
    """

    def __init__(
        self,
        graph: fx.Graph,
        results: Iterable[fx.Node],
        flow: Flow,
        exact: Mapping[fx.Node, Sequence[fx.Node]],
        numbers: RowNumbers,
    ) -> None:
        self.flow, self.exact, self.numbers = flow, exact, numbers
        self.of: dict[fx.Node, float] = {}
        self.odd: list[fx.Node] = []
        self._zeros: set[fx.Node] = set()
        before = leading_to(results)
        for node in (x for x in graph.nodes if x in before):
            if node.op == "placeholder":
                self.of[node] = sum(numbers.of(node).values())
                continue
            power = self._power(node) + self._rows_summed(node)
            if math.isnan(power):
                self.odd.append(node)
                power = 0.0
            self.of[node] = power
        self.odd += [x for x in results if flow.of[x].form is not Form.LOST and self.of[x]]

    def cause(self, node: fx.Node) -> fx.Node:
        """The op with which a power begins that is in an operand of this one, or in its result."""
        while True:
            operands = [x for x in input_nodes(node) if x.op == "call_function" and self.of.get(x)]
            before = next((x for x in operands if x.all_input_nodes), None)
            if before is None:
                return node
            node = before

    def is_sum(self, node: fx.Node) -> bool:
        """Whether an op adds up rows."""
        return self._rows_summed(node) > 0

    # -- the rules

    def _power(self, node: fx.Node) -> float:
        """The power in the result of an op that adds up no rows; NaN where it is none."""
        packet, of_numbers = packet_of(node), self.numbers.of(node)
        operands = [*input_nodes(node)]
        if self._is_zero(node):
            self._zeros.add(node)
        if not of_numbers and node not in self.exact and not any(self.of.get(x) for x in operands):
            return -1.0 if is_gradient_of_mean(node) else 0.0
        powers = [self._of_argument(node, at) for at in range(len(node.args))]
        numbers = [x for x in node.args[1:] if isinstance(x, int | float)]
        is_guarded = not of_numbers and all(abs(x) <= _LEAST for x in numbers)
        match packet:
            case None:
                return self._of_item(node)
            case _ if packet in _SIGNS or _is_bool(node):
                return 0.0
            case _ if packet in _FILLS:
                return sum(of_numbers.values())
            case aten.div | aten.reciprocal if node in self.exact:
                of_batch = _alike(self.of[x] for x in self.exact[node]) if self.exact[node] else 1.0
                return (powers[0] if packet is aten.div else 0.0) - of_batch
            case aten.div if not node.kwargs:
                return powers[0] - powers[1]
            case aten.pow if not of_numbers and numbers:
                return powers[0] * float(numbers[0])
            case _ if packet in _ROOTS:
                return powers[0] * _ROOTS[packet]
            case _ if packet in _PRODUCTS:
                first = _PRODUCTS[packet]
                return _alike([powers[first] + powers[first + 1], *powers[:first]])
            case aten.add | aten.sub | aten.rsub if node in self.flow.added and not of_numbers:
                # A sum over the rows beside one of them, which gets its power with the last of these.
                return _alike(
                    power - (x not in self.flow.single)
                    for x, power in zip(node.args[:2], powers, strict=False)
                )
            case aten.add | aten.sub | aten.rsub if "alpha" not in of_numbers:
                return _alike(self._terms(node) if is_guarded else powers[:2])
            case _ if packet in _GUARDS:
                is_count = self.flow.has(node.args[0], Form.SUMMED) and not of_numbers
                return _alike(self._terms(node)) if is_guarded or is_count else math.nan
            case _ if "_backward" in packet.__name__:
                of_operands = next((self.of[x] for x in operands if self.of.get(x)), 0.0)
                return of_operands - is_gradient_of_mean(node)
            case _ if packet in _ALIKE and not of_numbers:
                return _alike(self._terms(node))
        return math.nan

    def _of_item(self, node: fx.Node) -> float:
        """The power in one of several results; the weight of all labels is a sum, also beside a mean."""
        if node.target is not operator.getitem:
            return math.nan
        of = node_arg(node, 0)
        return self.of[of] + float(argument(of, "reduction") == _MEAN and node.args[1] == 1)

    def _is_zero(self, node: fx.Node) -> bool:
        """Whether all entries are known to be zero, which is any power times nothing."""
        packet, operands = packet_of(node), node.all_input_nodes
        if packet in _FILLS:
            return any(x == 0 for x in numbers_of(node).values())
        is_of_zeros = bool(operands) and self._zeros.issuperset(operands)
        return packet in _ZEROS or (is_of_zeros and (packet in _ALIKE or packet is aten.mul))

    def _of_argument(self, node: fx.Node, at: int) -> float:
        x = node.args[at]
        return self.of.get(x, 0.0) if isinstance(x, fx.Node) else self.numbers.of(node).get(at, 0.0)

    def _terms(self, node: fx.Node) -> list[float]:
        """The powers in the operands of the result's kind: places and masks have none."""
        operands = [x for x in input_nodes(node) if x not in self._zeros]
        if packet_of(node) not in COPIES:
            operands = [x for x in operands if is_float(x) == is_float(node)]
        return [self.of.get(x, 0.0) for x in operands]

    def _rows_summed(self, node: fx.Node) -> float:
        """1 of an op that adds up rows, or of the last one of a loop over them; 0 of others, as a mean."""
        packet = packet_of(node)
        is_sum = packet in _ADDING or packet in families.PRODUCTS or argument(node, "reduction") == _SUM
        is_sum |= packet in families.PLACED and argument(node, "accumulate") is True
        if _counts(node, self.flow):
            return self.numbers.summed(node)
        if not self.flow.has(node, Form.SUMMED):
            return 0.0
        if node in self.flow.single:
            return float(packet is not aten.mean)
        return float(is_sum and any(self.flow.has(x, Form.EACH) for x in input_nodes(node)))


def is_gradient_of_mean(node: fx.Node) -> bool:
    """Whether a value is the gradient of a mean that the forward takes, with a part for each entry."""
    packet = packet_of(node)
    if packet is aten.div and isinstance(node.args[1], int | float):
        x = node_arg(node, 0)
        is_expanded = packet_of(x) is aten.expand and node_arg(x, 0).meta["val"].numel() == 1
        return is_expanded and node.args[1] == x.meta["val"].numel()
    is_backward = packet is not None and packet.__name__.endswith("_backward")
    return is_backward and argument(node, "reduction") == _MEAN


def _is_bool(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype is torch.bool


def _alike(powers: Iterable[float]) -> float:
    """The power that all have; NaN where they differ."""
    one = {*powers}
    return one.pop() if len(one) == 1 else math.nan if one else 0.0


def has_numbers(graph: fx.Graph, loss: fx.Node, flow: Flow) -> bool:
    """Whether ops behind the last one that reads a parameter compute with numbers or constants, or count
    what is the same for all rows: these may follow from how many there are."""
    before = leading_to([loss])
    weights: set[fx.Node] = set()  # and what is made of them alone, but numbers
    readers: list[fx.Node] = []
    for node in (x for x in graph.nodes if x in before):
        is_weight = not weights.isdisjoint(node.all_input_nodes)
        if node.op == "placeholder":
            is_weight = node.meta["input"].kind is Kind.PARAMETER
        elif is_weight and not flow.has(node, Form.SAME):
            readers.append(node)
            continue
        if is_weight and shape_of(node):
            weights.add(node)

    def may_follow(node: fx.Node) -> bool:
        if node.op == "placeholder":
            return bool(node.meta["input"].kind is Kind.CONSTANT)
        if _counts(node, flow):
            return weights.isdisjoint(node.all_input_nodes)
        return is_float(node) and packet_of(node) is not aten.pow and bool(numbers_of(node))

    return any(map(may_follow, before - leading_to(readers)))


def _counts(node: fx.Node, flow: Flow) -> bool:
    """Whether an op may count rows: by a sum of what is the same for all, as of ones."""
    return packet_of(node) is aten.sum and flow.has(node, Form.SAME)
