"""Where the mean of what microbatches have of an output is not what the whole batch has.

    sum(right) / sum(mask)       each microbatch divides by its own number of labels
    cross_entropy(…).detach()    likewise, where labels are ignored
    exp(mean(losses))            another function of a mean
    sum(right)                   add up: none

The loss itself divides by the batch's numbers (``batch_means.py``); outputs are those of microbatches.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from fxpipe.capture.rows.analysis import RowAnalysis
from fxpipe.capture.rows.flow import is_number
from fxpipe.capture.rows.forms import CHOICE, packet_of
from fxpipe.capture.rules.loss_tail import MEAN, is_loss, line_of
from fxpipe.ir.builder import node_arg
from fxpipe.ir.graph import Kind
from fxpipe.ir.storage import graph_outputs, leading_to
from fxpipe.runtime.batch.microbatches import batch_leaves

aten = torch.ops.aten

_OF_ONE_NUMBER = {aten._to_copy, aten._unsafe_view, aten.alias, aten.detach, aten.reshape, aten.view}
#: What a script takes the largest or least of.
_ENDS = {aten.amax, aten.amin, aten.max, aten.min, aten.any, aten.all}


def warn_of_metrics(
    graph: fx.Graph, analysis: RowAnalysis, divisions: Collection[fx.Node], example: Any
) -> None:
    """Warn of numbers among the outputs of a captured step.

    analysis: which has followed all values.  divisions: of the loss, by counts of the data.  example: the
    microbatch of the step.
    """
    named, leaves = graph_outputs(graph), dict(batch_leaves(example))
    causes: dict[str, fx.Node] = {}
    of_loss = set[fx.Node]() if named.loss is None else leading_to([named.loss])
    for name, output in named.outputs.items():
        numbers = _numbers_of(output)
        if len(numbers) > 1:  # a step gives the whole batch's loss for this one
            numbers = [x for x in numbers if _without_shape(x) is not named.loss]
        if name == "loss" or not numbers:
            continue
        behind = leading_to(numbers)
        told = {node for node, why in analysis.told.items() if why != CHOICE and packet_of(node) not in _ENDS}
        means = {node for node in behind if is_loss(node) and node_arg(node, 0).args[3] == MEAN}
        odd = behind & (told - of_loss | {*divisions}) | means
        cause = next((n for n in graph.nodes if n in odd and not _divides_alike(n, analysis, leaves)), None)
        if cause is not None:
            causes[name] = cause
    if causes:
        line = line_of(next(iter(causes.values())))
        warnings.warn(
            f"Each microbatch has its own {', '.join(map(repr, causes))}, and their mean is not the whole "
            f"batch's ({line}): it divides by a number of labels, or is another function of a sum over rows. "
            "Let loss_fn return what it is made of, sums over rows, and compute it of the sums of all "
            'microbatches; mean="microbatch" of compile says that it is meant.',
            stacklevel=3,
        )


def _numbers_of(output: fx.Node) -> list[fx.Node]:
    """An output that is a number, or the numbers that one stacks; none of another."""
    parts = output.all_input_nodes if packet_of(output) is aten.stack else [output]
    value = output.meta["val"]
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return parts if is_float and all(map(is_number, parts)) else []


def _without_shape(node: fx.Node) -> fx.Node:
    while packet_of(node) in _OF_ONE_NUMBER:
        node = node_arg(node, 0)
    return node


def _divides_alike(node: fx.Node, analysis: RowAnalysis, leaves: Mapping[str, Any]) -> bool:
    """Whether an op divides by a count of the data to which all rows and labels of the example add alike."""

    def in_example(x: fx.Node) -> torch.Tensor | None:
        is_leaf = x.op == "placeholder" and x.meta["input"].kind is Kind.BATCH
        leaf = leaves.get(x.meta["input"].name) if is_leaf else None
        return leaf.cpu() if isinstance(leaf, torch.Tensor) else None

    if is_loss(node):
        loss = node_arg(node, 0)
        value = None if loss.args[2] is not None else analysis.computed(node_arg(loss, 1), in_example)
        return value is not None and loss.args[4] not in value
    divisor = node.args[-1] if packet_of(node) is aten.div else None
    if not isinstance(divisor, fx.Node):
        return False
    sums = [x for x in leading_to([divisor]) if packet_of(x) in (aten.sum, aten.mean)]
    values = (analysis.computed(node_arg(x, 0), in_example) for x in sums)
    return bool(sums) and all(x is not None and bool((x == x.flatten()[0]).all()) for x in values)
