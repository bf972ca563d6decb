"""Lets the means of a loss over the elements of a microbatch count as many elements as it has.

before: mean(x)                                  of [2, 7] in one microbatch, of [3, 12] in the next
after:  mul(mean(x), div(n, batch_mean(n)))      n = full([], 14), and 36

A step takes the mean over microbatches of losses and gradients.  With these factors that is the mean over the
elements of all microbatches.  Where all are equally long, each factor is 1.

A sum that is divided by a number which grows with the rows, as ``x.sum() / x.numel()``, is a mean, too.  One
whose number of elements does not, as ``x.mean(1)`` or ``x.sum(1) / x.shape[1]``, is one of each row, and has
no factor, unless it is one of means over rows, as ``x.mean(0).mean()``: then it counts for the product.

So it is with cross-entropies over labels, whose counts are data (``batch_means.py``).  Where such a count is
a mean itself, as ``mask.mean()``, its mean over the batch has the same weights:

before: batch_mean(count)
after:  div(batch_mean(mul(count, n)), batch_mean(n))
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import prod
from typing import Any

import torch
from torch import fx

from fxpipe.capture.rows.analysis import RowAnalysis
from fxpipe.capture.rules.batch_means import called
from fxpipe.capture.rules.loss_tail import Tail
from fxpipe.errors import SizeError
from fxpipe.ir.builder import Calls, node_arg
from fxpipe.ir.compat import OpOverload
from fxpipe.ir.dims import dims_of
from fxpipe.ir.graph import batch_mean
from fxpipe.ir.size import Size, sized
from fxpipe.ir.storage import argument, call_nodes, graph_outputs, leading_to, set_outputs
from fxpipe.plan.tensors import accum_dtype

aten = torch.ops.aten

_MEAN = 1  # of the reductions of losses
_FACTORS = {aten.mul, aten.div}
_EXACT = 2.0**53  # whole numbers below are floats


@dataclass(frozen=True, eq=False)
class TracesOfMeans:
    """The traces of a step, whose nodes match, which are rewritten all alike.

    ``lengths``: of each the lengths of its dimensions.  ``rows``: the name of the leading one.  ``varied``:
    those that microbatches of one step may have of their own.
    ``one_row``: the step of one row, whose ops may be others.
    """

    graphs: tuple[fx.Graph, ...]
    lengths: tuple[Mapping[str, int], ...]
    rows: str
    varied: Collection[str]
    one_row: tuple[fx.Graph, ...] = ()

    def used(self, numbers: Sequence[int]) -> Collection[str]:
        """The names of the lengths on which a number depends, that these traces have."""
        names = [*self.lengths[0]]
        size = sized(numbers, names, [tuple(each.values()) for each in self.lengths])
        # What is no expression of lengths the programs cannot compute, which is told later.
        return {*names} if size is None else size.used if isinstance(size, Size) else ()


def let_factors_be_whole(graph: fx.Graph) -> None:
    """Let values be multiplied and divided by 288, not 288.0: as that of ``float(x.numel())`` it may be an
    expression of lengths, and the result has the same bits."""
    for node in call_nodes(graph):
        if getattr(node.target, "overloadpacket", None) in _FACTORS and not node.kwargs:
            value, factor = node.args
            is_whole = isinstance(factor, float) and factor.is_integer() and 0 < factor < _EXACT
            if is_whole and node_arg(node, 0).meta["val"].dtype.is_floating_point:
                node.args = value, int(factor)  # type: ignore[arg-type]


def weigh_means(traces: TracesOfMeans) -> tuple[str, ...]:
    """Rewrite the traces.

    Returns the source lines of means that cannot be weighed: each microbatch keeps its own.  Raises SizeError
    where the loss is a mean times a length, and where the step of one row has other means.
    """
    named = graph_outputs(traces.graphs[0])
    if named.loss is None or named.count is not None:
        return ()
    of_graphs = [_Means.of(graph) for graph in (*traces.graphs, *traces.one_row)]
    first, *others = of_graphs
    if any((len(each.nodes), len(each.counts)) != (len(first.nodes), len(first.counts)) for each in others):
        raise SizeError("The loss takes other means of one row.")
    matched = of_graphs[: len(traces.graphs)]
    numbers = [[_number(each.nodes[k]) for each in matched] for k in range(len(first.nodes))]
    products, apart = _products(first, numbers, traces)
    of_counts = [_of_count(first, count, products) for count in first.counts]
    for k in [k for k in products if k in first.of_loss]:
        if named.grads and not all(_gradients(each.nodes[k]) for each in of_graphs):
            apart.add(k)
    for each in of_graphs:
        here = [_number(node) for node in each.nodes]
        for count, factors in zip(each.counts, of_counts, strict=True):
            if factors:
                _weigh_count(count, prod(here[f] for f in factors))
        for k, factors in products.items():
            if k in first.of_loss and k not in apart:
                _weigh(each.nodes[k], prod(here[f] for f in factors), each.linear)
    return tuple(dict.fromkeys(first.nodes[k].meta["origin"].source for k in sorted(apart)))


def own_means(traces: TracesOfMeans) -> tuple[str, ...]:
    """The source lines of means over rows with which the loss goes on by other ops than linear ones, as that
    of an auxiliary loss of experts does: each microbatch has its own."""
    if graph_outputs(traces.graphs[0]).loss is None:
        return ()
    means = []
    for graph in traces.graphs:
        loss, known = graph_outputs(graph).loss, _Means.of(graph).leads
        assert loss is not None, "as in the first"
        leads = leading_to([loss])
        means.append([n for n in call_nodes(graph) if n in leads and n not in known and _number(n)])
    lines = dict[str, None]()
    for nodes in zip(*means, strict=True) if len({*map(len, means)}) == 1 else ():
        used = traces.used([_number(node) for node in nodes])
        is_varied = not {*used}.isdisjoint(traces.varied)
        if is_varied and _kind(nodes[0], used, traces) is _Kind.ROWS:
            lines[nodes[0].meta["origin"].source] = None
    return tuple(lines)


@dataclass(frozen=True, eq=False)
class _Means:
    """What may be a mean in one trace.  ``nodes``: in order.  ``linear``: the ops of which the loss is a
    linear function.  ``counts``: the means over the batch of what it is divided by.  ``leads``: the ops that
    lead to these and to the loss.  ``divided``: those that follow from a count."""

    nodes: tuple[fx.Node, ...]
    linear: Collection[fx.Node]
    counts: tuple[fx.Node, ...]
    leads: Collection[fx.Node]
    divided: Collection[fx.Node]

    @staticmethod
    def of(graph: fx.Graph) -> _Means:
        loss = graph_outputs(graph).loss
        assert loss is not None
        linear = Tail(graph, RowAnalysis(graph)).linear
        counts = tuple(graph.find_nodes(op="call_function", target=batch_mean))
        leads = {*linear, *leading_to(counts)}
        nodes = [n for n in call_nodes(graph) if n in leads and _number(n)]
        divided: set[fx.Node] = set()
        for node in graph.nodes:
            if node.target is batch_mean or not divided.isdisjoint(node.all_input_nodes):
                divided.add(node)
        return _Means(tuple(nodes), linear, counts, leads, divided)

    @property
    def of_loss(self) -> set[int]:
        """The numbers of those of which the loss is a linear function."""
        return {k for k, node in enumerate(self.nodes) if node in self.linear}

    def below(self, node: fx.Node, of: Collection[int]) -> list[int]:
        """The next of these means on the way down from an op."""
        numbers = {self.nodes[k]: k for k in of}
        below, seen, todo = list[int](), set[fx.Node](), [*node.all_input_nodes]
        while todo:
            node = todo.pop()
            if node in numbers:
                below.append(numbers[node])
            elif node in self.leads and node not in seen:
                seen.add(node)
                todo += node.all_input_nodes
        return sorted({*below})


class _Kind(Enum):
    """What an op is: a mean over rows, and perhaps over other elements; one over others alone; a product with
    a length; none of these."""

    ROWS, OTHERS, FACTOR, NONE = range(4)


def _kind(node: fx.Node, used: Collection[str], traces: TracesOfMeans) -> _Kind:
    """used: the lengths on which its number depends."""
    has_rows, is_varied = traces.rows in traces.lengths[0], not set(used).isdisjoint(traces.varied)
    if _is_mean(node):
        dims = dims_of(node, node_arg(node, 0).meta["val"].dim())
        of_rows = traces.rows in used if has_rows else dims is None or 0 in dims
        return _Kind.ROWS if of_rows else _Kind.OTHERS if is_varied else _Kind.NONE
    of_rows = traces.rows in used if has_rows else is_varied
    if of_rows and _divides(node):
        return _Kind.ROWS
    return _Kind.FACTOR if is_varied else _Kind.NONE


def _products(
    means: _Means, numbers: Sequence[Sequence[int]], traces: TracesOfMeans
) -> tuple[dict[int, list[int]], set[int]]:
    """The means that are weighed, each with those whose numbers of elements are multiplied, and others that
    cannot be.

    numbers: of each op in all traces.  Raises SizeError for a mean that is multiplied by a length.
    """
    factors: dict[int, list[int]] = {}
    apart, inner = set[int](), set[int]()

    def weights(k: int) -> list[int]:
        return [prod(each) for each in zip(*(numbers[f] for f in factors[k]), strict=True)]

    def is_varied(k: int) -> bool:
        return not {*traces.used(weights(k))}.isdisjoint(traces.varied)

    for k, node in enumerate(means.nodes):  # in order, those below first
        kind = _kind(node, traces.used(numbers[k]), traces)
        below = means.below(node, factors)
        if kind is _Kind.ROWS or (kind is _Kind.OTHERS and below):
            factors[k] = [k, *(factors[below[0]] if below else ())]
            inner.update(below)
            if any(not _are_proportional(weights(below[0]), weights(each)) for each in below):
                apart |= {k, *below}
        is_mean = k in factors and is_varied(k)
        if k in means.of_loss and (
            (node in means.divided and (is_mean or kind is _Kind.FACTOR)) or (kind is _Kind.FACTOR and below)
        ):
            raise SizeError(
                "The loss is a mean times a number that follows from lengths, in "
                f"{node.meta['origin'].source}: it has no mean over microbatches of several lengths. With "
                'mean="microbatch" each has its own.'
            )
    varied = {k for k in factors if is_varied(k)}
    return {k: factors[k] for k in varied - inner - apart}, apart & varied


def _are_proportional(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a * other[0] == b * one[0] for a, b in zip(one, other, strict=True))


def _of_count(means: _Means, count: fx.Node, products: Mapping[int, Sequence[int]]) -> Sequence[int]:
    """The means whose numbers of elements are the weight of a count.  Raises SizeError where it is a sum of
    several."""
    below = means.below(count, products)
    if len(below) > 1:
        raise SizeError(f"The loss is divided by several means in {count.meta['origin'].source}.")
    return products[below[0]] if below else ()


def _number(node: fx.Node) -> int:
    """The number of elements that an op takes the mean of, or the one by which it divides or multiplies, with
    those of what it is applied to; 0 for other ops, and where another one goes on with it."""
    if _is_mean(node):
        return _elements(node)
    if not _is_product(node) or any(map(_is_product, node.users)):
        return 0
    number: Any = 1
    while _is_product(node):
        number *= node.args[1]
        node = node_arg(node, 0)
    return number  # type: ignore[no-any-return]


def _is_product(node: fx.Node) -> bool:
    """Whether an op multiplies or divides by a whole number."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet in _FACTORS and not node.kwargs and type(node.args[1]) is int


def _divides(node: fx.Node) -> bool:
    """Whether an op, and those that it goes on with, divide."""
    while _is_product(node):
        if node.target.overloadpacket is not aten.div:  # type: ignore[union-attr]
            return False
        node = node_arg(node, 0)
    return True


def _is_mean(node: fx.Node) -> bool:
    if getattr(node.target, "overloadpacket", None) is aten.mean:
        return True
    is_one = isinstance(node.target, OpOverload) and isinstance(node.meta["val"], torch.Tensor)
    return is_one and argument(node, "reduction") == _MEAN


def _elements(node: fx.Node) -> int:
    """The number of elements of which each element of a mean is one."""
    values: torch.Tensor = node_arg(node, 0).meta["val"]
    mean: torch.Tensor = node.meta["val"]
    return values.numel() // max(1, mean.numel())


def _gradients(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The ops that differentiate a mean and take its gradient, each with that."""
    seq = node.meta["origin"].seq
    ops = [
        other
        for other in call_nodes(node.graph)
        if seq is not None and other.meta["origin"].backward and other.meta["origin"].seq == seq
    ]
    return [
        (op, value)
        for op in ops
        for value in op.all_input_nodes
        if value not in ops and value.op == "call_function" and value.meta["origin"].backward
    ]


def _weigh(node: fx.Node, number: int, users: Collection[fx.Node]) -> None:
    """number: of the elements.  users: the ops that get the weighted mean."""
    graph, value = node.graph, node.meta["val"]
    call = partial(called, Calls(graph))
    before, gradients = [user for user in node.users if user in users], _gradients(node)
    with graph.inserting_before(node.next), value.fake_mode:
        count = _full(node, number, value)
        share = call(node, aten.div.Tensor, count, call(node, batch_mean, count))
        if share.meta["val"].dtype != value.dtype:
            share = call(node, aten._to_copy.default, share, dtype=value.dtype)
        weighted = call(node, aten.mul.Tensor, node, share)
    for user in before:
        user.replace_input_with(node, weighted)
    if graph_outputs(graph).loss is node:
        set_outputs(graph, loss=weighted)
    for op, gradient in gradients:
        with graph.inserting_before(op):
            op.replace_input_with(gradient, call(op, aten.mul.Tensor, gradient, share))


def _weigh_count(mean: fx.Node, number: int) -> None:
    """Weigh the count of a mean over the batch."""
    graph, value, users = mean.graph, mean.meta["val"], [*mean.users]
    call = partial(called, Calls(graph))
    with graph.inserting_before(mean), value.fake_mode:
        count = _full(mean, number, value)
        mean.args = (call(mean, aten.mul.Tensor, mean.args[0], count),)
    with graph.inserting_before(mean.next), value.fake_mode:
        weighted = call(mean, aten.div.Tensor, mean, call(mean, batch_mean, count))
    for user in users:
        user.replace_input_with(mean, weighted)


def _full(of: fx.Node, number: int, value: torch.Tensor) -> fx.Node:
    dtype = accum_dtype(value.dtype)
    return called(Calls(of.graph), of, aten.full.default, [], number, dtype=dtype, device=value.device)
