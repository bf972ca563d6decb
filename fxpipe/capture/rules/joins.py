"""Where a loss is another function of the rows of a microbatch than a sum or a mean over them.

    mean(square(x - y))             a mean
    sqrt(mean(square(x - y)))       sqrt of a mean
    mul(mean(a, 0), mean(b, 0))     a product of two means
    sub(x, mean(x))                 a number of all rows for each of them
    mean(topk(losses, 8))           a choice among the rows
    x[: len(x) // 2]                some rows by their place
    sum(square(x - y))              a sum that nothing divides by the number of rows

The mean of what the microbatches have of these is not what the whole batch has.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from math import inf

import torch
from torch import fx

from fxpipe.capture.rows import families
from fxpipe.capture.rows.analysis import RowAnalysis
from fxpipe.capture.rows.forms import Form, packet_of
from fxpipe.capture.rules.inner_gradients import uses_of_means
from fxpipe.ir.builder import node_arg
from fxpipe.ir.dims import TRANSPOSES, is_pointwise
from fxpipe.ir.graph import Kind
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.storage import argument, leading_to

aten = torch.ops.aten

_SUM = 2  # of the reductions of losses
_SUMS = aten.sum, aten.nansum


@dataclass(frozen=True)
class Joins:
    """``ops``: by which a loss is no sum over rows, with the reason.  ``sums``: over rows, that nothing
    divides by their number."""

    ops: dict[fx.Node, str]
    sums: tuple[fx.Node, ...]


def joins_of(analysis: RowAnalysis, graph: fx.Graph, loss: fx.Node, exact: Set[fx.Node]) -> Joins:
    """What joins the rows of a microbatch in the loss of a captured step.

    exact: divisions that are made by a count of the whole batch.
    """
    analysis.follow(exact)
    told = analysis.told | uses_of_means(graph, analysis)
    behind, todo = set[fx.Node](), [loss]
    while todo:
        node = todo.pop()
        if node not in behind:
            behind.add(node)
            todo += [node_arg(node, 0)] if node in exact else node.all_input_nodes
    ops = {node: told[node] for node in graph.nodes if node in told and node in behind and node not in exact}
    return Joins(ops, tuple(_undivided_sums(loss, analysis, exact)))


def _undivided_sums(loss: fx.Node, analysis: RowAnalysis, exact: Set[fx.Node]) -> Iterator[fx.Node]:
    """The sums over rows that the loss adds as they are, or times a number that is no part of a count."""
    forms = {node: rows.form for node, rows in analysis.of.items()}
    todo, seen = [loss], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in exact or node in seen or forms.get(node) is not Form.SUMMED:
            continue
        seen.add(node)
        packet = packet_of(node)
        operands = [*input_nodes(node)]
        states = {forms[x] for x in operands}
        if packet is None:  # an item: what a cross-entropy gives
            if argument(operands[0], "reduction") == _SUM:
                yield node
        elif node in analysis.single:  # the sum of a loop over the rows
            yield node
        elif Form.EACH in states:
            is_sum = packet in _SUMS or packet in families.PRODUCTS or packet in families.PLACED
            is_sum |= argument(node, "reduction") == _SUM
            if is_sum and exact.isdisjoint(_summed(node, analysis)):
                yield node
            todo += (
                x for operand in operands if (plus := analysis.of[operand].plus) for x in input_nodes(plus)
            )
        elif packet in (aten.div, aten.mul):
            numbers = [x for x in node.args if x not in operands]
            of_rows = [x for x in operands if forms[x] is Form.SUMMED]
            is_number = len(operands) == len(numbers) == 1 and isinstance(numbers[0], int | float)
            is_count = is_number and _is_part_of_a_count(packet, float(numbers[0]), of_rows[0], analysis)  # type: ignore
            is_factor = is_number or any(_is_factor(x) for x in operands if forms[x] is Form.SAME)
            todo += of_rows if is_factor and not is_count else []
        elif Form.LOST not in states and node not in analysis.told:  # it is linear
            todo += operands


def _is_factor(node: fx.Node) -> bool:
    """Whether a number comes from parameters or from the batch, and is no count that the model computes."""
    inputs = (x.meta["input"].kind for x in leading_to([node]) if x.op == "placeholder")
    return any(kind in (Kind.PARAMETER, Kind.BATCH) for kind in inputs)


def _is_part_of_a_count(packet: object, number: float, node: fx.Node, analysis: RowAnalysis) -> bool:
    """Whether a number divides what is summed by how many these are: 1 / 6 or 1 / 12, of 6 rows of 2; a half
    is that of a squared error."""
    if number == 0:
        return True  # nothing is left of the sum
    count = number if packet is aten.div else 1 / number
    if number == 0.5 or not 1 <= count < inf or abs(count - round(count)) > 1e-6 * count:
        return False
    if node in analysis.single:
        return round(count) % analysis.rows == 0
    values = (x.meta["val"] for x in _summed(node, analysis))
    shapes = [x.shape for x in values if isinstance(x, torch.Tensor) and x.dim() and x.numel()]
    return any(s.numel() % round(count) == 0 and round(count) % s[0] == 0 for s in shapes)


def _summed(node: fx.Node, analysis: RowAnalysis) -> set[fx.Node]:
    """What is summed: the values from which a sum, or a product that is one, is made entry by entry."""
    todo, seen = [node], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            packet = packet_of(node)
            is_sum = packet in families.PRODUCTS and analysis.has(node, Form.SUMMED)
            if is_sum or packet is None or is_pointwise(node) or packet in _ENTRYWISE:
                todo += node.all_input_nodes
    return seen


_ENTRYWISE = (
    families.POINTWISE | families.PARTS | families.PLACED | families.SHAPES | families.JOINED
    | families.LINEAR | TRANSPOSES
    | {aten.gather, aten.index, aten.mean, aten.nll_loss2d_forward, aten.nll_loss_forward, aten.sum}
)  # fmt: skip
