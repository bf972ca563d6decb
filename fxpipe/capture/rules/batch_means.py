"""Lets the divisors of a loss that count what its mean is over be means over the batch.

before: div(sum, count)                          each microbatch by its own count of labels
after:  div(sum, batch_mean(count))              all by the mean of their counts
before: nll_loss_forward(…, mean)
after:  div(nll_loss_forward(…, sum), batch_mean(sum(ne(labels, -100))))

So the mean over microbatches, which is what a step takes of losses and of gradients, is the loss of the whole
batch: (a / n + b / n) / 2 with n = (count of a + count of b) / 2.  The mean of each microbatch's own mean is
another loss wherever microbatches have different counts.

A divisor must be a sum or a mean over rows of the data (``rows/analysis.py``), and the loss a linear function
of what it divides; each term of a sum may have its own.  One that is made of such a sum and of fixed numbers,
as ``clamp(count, 1)``, is made of the whole batch's, of which each microbatch has its share:

after:  div(sum, mul(clamp(div(batch_mean(count), 1 / microbatches), 1), 1 / microbatches))

A number of the batch by which a sum over rows is divided is one of all microbatches of a replica, of which
each has its share; with the numbers of other replicas they make the mean:

before: div(sum, total)
after:  div(sum, batch_mean(mul(total, 1 / microbatches)))

``BatchMeans`` names those, and those that stay, as do other functions of a sum over rows (``joins.py``).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpipe.capture.rows.forms import SUMMED
from fxpipe.capture.rules.loss_tail import SUM, Division, Tail, is_loss
from fxpipe.ir.builder import Calls, node_arg
from fxpipe.ir.graph import batch_mean
from fxpipe.ir.nodes import copy_node
from fxpipe.ir.size import Share
from fxpipe.ir.storage import drop_dead, graph_outputs, leading_to, operands_first, set_outputs
from fxpipe.plan.tensors import accum_dtype

aten = torch.ops.aten


@dataclass(frozen=True)
class BatchMeans:
    """What a loss takes of all rows, as text for ``explain``.  ``exact``: divisors that are means over the
    batch.  ``apart``: divisors, and functions of sums over rows, of which each microbatch has its own.
    ``totals``: the leaves with numbers of the whole batch by which a sum over rows is divided."""

    exact: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    totals: tuple[str, ...] = ()


NO_MEANS = BatchMeans()


def divide_by_batch_means(tail: Tail, share: float, replicas: int) -> BatchMeans:
    """Rewrite a captured step, forward and backward.

    tail: the end of its forward.  share: of a microbatch in the batch of a replica, 1 / microbatches.
    """
    if tail.divisions:
        divisions = [_as_division(tail, each) for each in tail.divisions]
        _keep_for_others(tail, {each.node for each in divisions})
        for each in divisions:
            _divide_by_mean(tail, each, share, replicas)
        drop_dead(tail.graph)
    exact = dict.fromkeys(each.text for each in tail.divisions)
    return BatchMeans(tuple(exact), tuple(dict.fromkeys(tail.apart.values())), tuple(sorted(tail.totals)))


def _as_division(tail: Tail, division: Division) -> Division:
    """A mean cross-entropy as its sum, divided by the count of its labels."""
    item = division.node
    if not is_loss(item):
        return division
    loss, call = node_arg(item, 0), partial(called, tail.calls, item)
    logs, labels, weight, _, ignored = loss.args
    loss.args = (logs, labels, weight, SUM, ignored)
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
    return Division(mean, division.backward, division.text, (count,))


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


def _divide_by_mean(tail: Tail, division: Division, share: float, replicas: int) -> None:
    node, call = division.node, partial(called, tail.calls, division.node)
    *before, divisor = node.args
    assert isinstance(divisor, fx.Node)
    dtype, values = node.meta["val"].dtype, dict[fx.Node, fx.Node]()

    def cast(value: fx.Node, dtype: torch.dtype) -> fx.Node:
        return value if value.meta["val"].dtype == dtype else call(aten._to_copy.default, value, dtype=dtype)

    def mean_of(count: fx.Node) -> fx.Node:
        return call(batch_mean, cast(count, accum_dtype(dtype)))

    def scaled(op: Any, value: fx.Node) -> fx.Node:
        """Multiplied, or divided, by the share of a microbatch in the batch of all replicas."""
        # Also of an evaluation, in which a short batch has fewer.
        value = call(op, value, Share(share))
        return value if replicas == 1 else call(op, value, 1 / replicas)

    def of_batch(part: fx.Node) -> fx.Node:
        """What the whole batch has of a part of the divisor."""
        if tail.is_fixed(part):
            return part
        if part in division.counts:
            mean = mean_of(part)
            return scaled(aten.div.Tensor, mean) if division.power else mean
        operands: Any = fx.map_arg((part.args, dict(part.kwargs)), values.__getitem__)
        args, kwargs = operands
        is_cast = part.target is aten._to_copy.default and args[0].meta["val"].is_floating_point()
        return args[0] if is_cast else call(part.target, *args, **kwargs)

    def operands(part: fx.Node) -> Sequence[fx.Node]:
        return () if tail.is_fixed(part) or part in division.counts else part.all_input_nodes

    with tail.graph.inserting_before(node):
        for part in operands_first(divisor, values, operands) if division.counts else ():
            values[part] = of_batch(part)
        if division.totals:
            tail.totals |= division.totals
            # Also of an evaluation, in which a short batch has fewer.
            part = call(aten.mul.Tensor, cast(divisor, accum_dtype(dtype)), Share(share))
            mean = call(batch_mean, part)
        else:
            mean = values.get(divisor) or mean_of(divisor)
            mean = scaled(aten.mul.Tensor, mean) if division.power else mean
        mean = cast(mean, dtype)
    node.args = (*before, mean)
    for other, place in division.backward:
        other.args = (*other.args[:place], mean, *other.args[place + 1 :])


def called(calls: Calls, of: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new op, where the graph inserts, of another one's origin."""
    values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    val, origin = target(*values, **named), of.meta["origin"]
    if not origin.backward:
        origin = replace(origin, seq=None)  # autograd differentiates the other op alone, in that one's stage
    return calls(target, args, kwargs, val=val, origin=origin)
