"""Lets the means of a loss over the elements of a microbatch count as many elements as it has.

before: mean(x)                                  of [2, 7] in one microbatch, of [2, 12] in the next
after:  mul(mean(x), div(n, batch_mean(n)))      n = full([], 14), and 24

A step takes the mean over microbatches of losses and gradients.  With these factors that is the mean over the
elements of all microbatches.  Where all are equally long, each factor is 1.

So it is with cross-entropies over labels, whose counts are data (``batch_means.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import fx

from fxpipe.capture.rules.batch_means import Tail, called
from fxpipe.ir.builder import Calls, node_arg
from fxpipe.ir.compat import OpOverload
from fxpipe.ir.dims import dims_of
from fxpipe.ir.graph import batch_mean
from fxpipe.ir.storage import argument, call_nodes, graph_outputs, set_outputs
from fxpipe.plan.tensors import accum_dtype

aten = torch.ops.aten

_MEAN = 1  # of the reductions of losses


def weigh_means(graphs: Sequence[fx.Graph], lengths: Collection[fx.Graph]) -> tuple[str, ...]:
    """Rewrite the traces of a step, whose nodes match, all alike.

    lengths: those of them at other lengths, by which the means are told whose number of elements varies.
    Returns the source lines of means whose gradients do not show: each microbatch keeps its own.
    """
    named = graph_outputs(graphs[0])
    if named.loss is None or named.count is not None:
        return ()
    nodes = [list(graph.nodes) for graph in graphs]
    linear = Tail(graphs[0], named.loss).linear
    tail = [k for k, node in enumerate(nodes[0]) if node in linear]
    varied = [each for each, graph in zip(nodes, graphs, strict=True) if graph in lengths]
    apart = []
    for k in tail:
        if not _is_mean(nodes[0][k]) or len({_elements(each[k]) for each in varied}) == 1:
            continue
        if named.grads and not all(_gradients(each[k]) for each in nodes):
            apart.append(nodes[0][k].meta["origin"].source)
            continue
        for each in nodes:
            _weigh(each[k], {each[other] for other in tail})
    return tuple(apart)


def _is_mean(node: fx.Node) -> bool:
    """Whether an op takes the mean over the first dimension at least, which has the rows of a microbatch."""
    if getattr(node.target, "overloadpacket", None) is aten.mean:
        dims = dims_of(node, node_arg(node, 0).meta["val"].dim())
        return dims is None or 0 in dims
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


def _weigh(node: fx.Node, tail: Collection[fx.Node]) -> None:
    """tail: the ops whose results are linear functions of a mean, which get the weighted one."""
    graph, value = node.graph, node.meta["val"]
    call = partial(called, Calls(graph))
    users, gradients, dtype = (
        [user for user in node.users if user in tail],
        _gradients(node),
        accum_dtype(value.dtype),
    )
    with graph.inserting_before(node.next), value.fake_mode:
        count = call(node, aten.full.default, [], _elements(node), dtype=dtype, device=value.device)
        share = call(node, aten.div.Tensor, count, call(node, batch_mean, count))
        if dtype != value.dtype:
            share = call(node, aten._to_copy.default, share, dtype=value.dtype)
        weighted = call(node, aten.mul.Tensor, node, share)
    for user in users:
        user.replace_input_with(node, weighted)
    if graph_outputs(graph).loss is node:
        set_outputs(graph, loss=weighted)
    for op, gradient in gradients:
        with graph.inserting_before(op):
            op.replace_input_with(gradient, call(op, aten.mul.Tensor, gradient, share))
