"""Where a loss is another function of the rows of a microbatch than a sum or a mean over them.

    mean(square(x - y))             a mean
    sqrt(mean(square(x - y)))       sqrt of a mean
    mul(mean(a, 0), mean(b, 0))     a product of two means
    sub(x, mean(x))                 a number of all rows for each of them
    mean(topk(losses, 8))           a choice among the rows
    x[: len(x) // 2]                some rows by their place
    sum(square(x - y))              a sum that nothing divides by the number of rows
    mean(square(x - y)) * len(x)    a mean times the number of rows

The mean of what the microbatches have of these is not what the whole batch has.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpipe.capture.rows.analysis import RowAnalysis
from fxpipe.capture.rows.forms import BY_PLACE
from fxpipe.capture.rows.numbers import RowNumbers, twice_the_rows
from fxpipe.capture.rows.powers import RowPowers, has_numbers, is_gradient_of_mean
from fxpipe.capture.rules.loss_tail import Division, Tail, line_of
from fxpipe.errors import number_of
from fxpipe.ir.builder import node_arg
from fxpipe.ir.storage import graph_outputs, leading_to

NUMBER = "it computes with a number that follows from how many rows there are"
OF_MEAN = (
    "the forward takes the gradient of a mean over the rows, which is divided by their number: take that of "
    "the sum"
)
#: A microbatch -> the graph of its forward with its constants; None of one that the model does not take.
Forward = Callable[[Any], tuple[fx.Graph, Mapping[str, torch.Tensor]] | None]
_MOST_NAMED = 3  # operands of an op in a warning


@dataclass(frozen=True)
class Joins:
    """``ops``: by which a loss is no sum over rows, with the reason.  ``sums``: over rows, that nothing
    divides by their number.  ``exact``: the texts of divisors that can be the whole batch's."""

    ops: dict[fx.Node, str]
    sums: tuple[fx.Node, ...]
    exact: frozenset[str]


def joins_of(tail: Tail, analysis: RowAnalysis, numbers: Callable[[], RowNumbers | None]) -> Joins:
    """What joins the rows of a microbatch in the loss of a captured step.

    numbers: those of the forward, for which it is traced once more; None of a model that takes no other
    number of rows.
    """
    graph, exact = tail.graph, {each.node: each.counts for each in tail.divisions}
    loss = graph_outputs(graph).loss
    assert loss is not None, "that of the tail"
    analysis.follow(exact)
    behind, todo = set[fx.Node](), [loss]
    while todo:
        node = todo.pop()
        if node not in behind:
            behind.add(node)
            operands = node.args[:-1] if node in exact else node.all_input_nodes
            todo += [x for x in operands if isinstance(x, fx.Node)]
    told, sums = {**analysis.told}, list[fx.Node]()
    groups = {node: dim for node, dim in analysis.split.items() if node.args[1][dim] != -1}  # type: ignore[index]
    known = numbers() if groups or has_numbers(graph, loss, analysis) else RowNumbers(graph, {})
    if known is not None:
        told |= {node: BY_PLACE for node, dim in groups.items() if known.is_as_long(node, dim)}
        powers = RowPowers(graph, [loss], analysis, exact, known)
        for node in powers.odd:
            cause = powers.cause(node)
            if powers.is_sum(cause) or cause in exact:
                sums += [cause] if node in behind else []
            elif is_gradient_of_mean(cause):
                told.setdefault(node, OF_MEAN)
            else:
                told.setdefault(cause, NUMBER)
        for each in tail.divisions:
            if each.power is not None and _has_rows(tail, each, powers):
                del exact[each.node]
                told[each.node] = NUMBER
    ops = {node: told[node] for node in graph.nodes if node in told and node in behind and node not in exact}
    return Joins(ops, tuple(sums), frozenset(each.text for each in tail.divisions if each.node in exact))


def _has_rows(tail: Tail, division: Division, powers: RowPowers) -> bool:
    """Whether numbers beside the counts of a divisor follow from how many rows there are, or make of them a
    mean where ``tail`` takes them for sums."""
    beside = leading_to([node_arg(division.node, -1)], lambda node: node not in division.counts)
    of_rows = (powers.numbers.of(x) or (tail.is_fixed(x) and powers.of.get(x)) for x in beside)
    return any(of_rows) or any(powers.of[count] != division.power for count in division.counts)


def warn_of_joins(tail: Tail, analysis: RowAnalysis, example: Any, forward: Forward) -> None:
    """Warn of what makes the loss of a captured step no mean of microbatches, and let ``tail`` have it apart.

    example: the microbatch of the step.  forward: traces that of another one.
    """
    judged = tail

    def numbers() -> RowNumbers | None:
        twice = forward(twice_the_rows(example))
        return None if twice is None else RowNumbers(judged.graph, analysis.constants, twice)

    joins = joins_of(tail, analysis, numbers)
    exact = joins.exact
    if analysis.is_unsure and (two := forward(twice_the_rows(example))):
        # What these ops do with several rows is seen with two.
        example, analysis = twice_the_rows(example), RowAnalysis(*two)
        judged = Tail(two[0], analysis)
        joins = joins_of(judged, analysis, numbers)
        exact &= joins.exact
    tail.divisions = [each for each in tail.divisions if each.power is None or each.text in exact]
    divides = {*judged.apart}
    judged.apart |= {node: _function(node) for node in joins.ops if node not in divides}
    odd = [node for node in judged.apart if node in judged.odd or joins.ops.get(node)] or tail.odd
    tail.apart |= judged.apart
    if odd:
        is_divisor = odd[0] in divides or odd is tail.odd
        _warn_of_op(tail.apart[odd[0]], joins.ops.get(odd[0], ""), len(odd) - 1, is_divisor)
    elif joins.sums:
        warnings.warn(
            f"The loss is a sum over rows that nothing divides by their number ({line_of(joins.sums[0])}). A "
            "step has the mean of what its microbatches have: the sum over the whole batch, divided by the "
            "number of microbatches; so are its gradients. Divide by the rows that the loss gets, or let "
            'loss_fn return (sum, count); mean="microbatch" of compile says that it is meant.',
            stacklevel=2,
        )


def _warn_of_op(text: str, why: str, others: int, is_divisor: bool) -> None:
    verb, values, remedy = "takes", "has its own", ""
    if is_divisor:
        verb, values = "divides by", "has its own (NaN, of a mean over labels of which it has none)"
        why = "it is no sum over rows of the data, or divides inside a custom autograd.Function"
        remedy = "Take a loss that is a sum over rows, or let loss_fn return (sum, count); "
    more = f" {number_of(others, 'other op')} too: pipe.explain() lists them." if others else ""
    warnings.warn(
        f"The loss {verb} {text}, of which fxpipe cannot take the whole batch's: {why}. Each microbatch "
        f"{values}, and the mean of their losses is another one than the whole batch's.{more} {remedy}"
        'mean="microbatch" of compile says that it is meant.',
        stacklevel=3,
    )


def _function(node: fx.Node) -> str:
    if node.target is operator.getitem:
        node = node_arg(node, 0)
    first, *others = [x.name for x in node.all_input_nodes] or ["…"]
    operands = ", ".join([first, *(others if len(others) < _MOST_NAMED else ["…"])])
    return f"{node.target.overloadpacket.__name__}({operands}) ({line_of(node)})"  # type: ignore[union-attr]
