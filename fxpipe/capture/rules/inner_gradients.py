"""Finds gradients of a mean over rows that a forward takes, and what they are used for.

g, = torch.autograd.grad(loss.mean(), x)    of each row, divided by the number of rows
x + 0.1 * g                                 of a microbatch other than of a batch, which has more rows
x + 0.1 * g.sign(), g / g.norm(dim=1)       the same of both
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from fxpipe.capture.rows.analysis import RowAnalysis
from fxpipe.capture.rows.forms import Form
from fxpipe.ir.builder import node_arg
from fxpipe.ir.dims import COPIES, RESHAPES, TRANSPOSES
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.storage import argument, call_nodes

aten = torch.ops.aten

OF_MEAN = (
    "the forward takes the gradient of a mean over the rows, which is divided by their number: take that of "
    "the sum"
)
_MEAN = 1  # of the reductions of losses
_LEAST = 1e-3  # a larger number is no guard against zero
_SIGNS = {
    aten.argmax, aten.argmin, aten.eq, aten.ge, aten.gt, aten.le, aten.lt, aten.ne, aten.ones_like, aten.sgn,
    aten.sign, aten.zeros_like,
}  # fmt: skip
#: Ops whose result is as many times larger as their operand, or the product of theirs.
_PRODUCTS = {aten.bmm, aten.mm, aten.mul, aten.mv}
_KEPT = COPIES | RESHAPES | TRANSPOSES | {
    aten.abs, aten.amax, aten.amin, aten.expand, aten.linalg_vector_norm, aten.mean, aten.neg, aten.relu,
    aten.select, aten.slice, aten.squeeze, aten.sum, aten.unsqueeze, aten.where,
}  # fmt: skip
_POWERS = {aten.reciprocal: -1.0, aten.rsqrt: -0.5, aten.sqrt: 0.5}


def uses_of_means(graph: fx.Graph, analysis: RowAnalysis) -> dict[fx.Node, str]:
    """The ops that make of such gradients what is another number for each number of rows, with the reason."""
    powers: dict[fx.Node, float] = {}  # of the number of rows, in values with a part for each row
    uses: dict[fx.Node, str] = {}
    for node in call_nodes(graph):
        if node.meta["origin"].backward:
            continue
        if _is_of_mean(node):
            powers[node] = -1.0
        elif any(powers.get(x) for x in input_nodes(node)):
            power = _power(node, powers)
            is_sum = analysis.of[node].form is Form.SUMMED
            if power is None or (is_sum and power not in (0.0, -1.0)):
                uses[node] = OF_MEAN
            elif not is_sum:  # else it is the mean that the gradient is of
                powers[node] = power
    return uses


def _is_of_mean(node: fx.Node) -> bool:
    """Whether a value is the gradient of a mean, with a part for each entry."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is aten.div and isinstance(node.args[1], int | float):
        x = node_arg(node, 0)
        is_expanded = getattr(x.target, "overloadpacket", None) is aten.expand
        return (
            is_expanded and node_arg(x, 0).meta["val"].numel() == 1 and node.args[1] == x.meta["val"].numel()
        )
    is_backward = packet is not None and packet.__name__.endswith("_backward")
    return is_backward and argument(node, "reduction") == _MEAN


def _power(node: fx.Node, powers: Mapping[fx.Node, float]) -> float | None:
    """The power of the number of rows in the result of an op; None where it is no power."""
    packet = getattr(node.target, "overloadpacket", None)
    of_operands = [powers.get(x, 0.0) for x in node.args if isinstance(x, fx.Node)]
    numbers = [x for x in node.args[1:2] if isinstance(x, int | float)]
    if packet in _SIGNS:
        return 0.0
    if packet in _PRODUCTS:
        return sum(of_operands)
    if packet is aten.div:
        return of_operands[0] - sum(of_operands[1:])
    if packet is aten.pow and numbers:
        return of_operands[0] * numbers[0]
    if packet in _POWERS:
        return of_operands[0] * _POWERS[packet]
    if packet in (aten.add, aten.sub, aten.clamp, aten.clamp_min, aten.maximum):
        is_guarded = len(of_operands) == 1 and all(abs(x) <= _LEAST for x in numbers)
        return of_operands[0] if is_guarded or (len({*of_operands}) == 1 and not numbers) else None
    is_linear = packet is not None and "_backward" in packet.__name__
    if packet is None or packet in _KEPT or is_linear:
        return next((power for power in of_operands if power), 0.0)
    return None
