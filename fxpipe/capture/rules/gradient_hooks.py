"""Finds functions of gradients, in a model's own code, that are not those of the gradients of a whole batch.

    weight.register_hook(lambda g: g.clamp(-1, 1))      of what each microbatch adds, instead of their sum
    weight.register_hook(lambda g: g + 0.1 * weight)    likewise, as often as there are microbatches
    hidden.register_hook(lambda g: g / g.norm())        the norm of a microbatch's rows, instead of all
    return grad, torch.ones(())                         in a Function that hides a loss beside its result: the
                                                        gradient of a mean over each microbatch, undivided

A factor, a mask, and any function of each row's gradient alone give what they give for the whole batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Container, Iterator, Sequence
from itertools import chain

import torch
from torch import fx

from fxpipe.capture.rows.families import NO_NUMBERS
from fxpipe.capture.rows.forms import packet_of, shape_of
from fxpipe.capture.rows.powers import is_gradient_of_mean
from fxpipe.errors import printable
from fxpipe.ir.builder import node_arg
from fxpipe.ir.dims import COPIES, RESHAPES, TRANSPOSES, dims_of
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.storage import call_nodes, graph_outputs, leading_to

aten = torch.ops.aten

#: Ops that are linear in all operands together, those that are in one, and functions of several rows.
_LINEAR = COPIES | RESHAPES | TRANSPOSES | {
    aten.add, aten.cat, aten.expand, aten.index, aten.index_put, aten.masked_fill, aten.mean, aten.neg,
    aten.select, aten.slice, aten.squeeze, aten.stack, aten.sub, aten.sum, aten.unsqueeze, aten.where,
}  # fmt: skip
_FACTORS = {aten.mm, aten.mul, aten.mv}
_OF_ALL = {
    aten.amax, aten.amin, aten.kthvalue, aten.linalg_vector_norm, aten.max, aten.median, aten.min, aten.norm,
    aten.sort, aten.std, aten.topk, aten.var,
}  # fmt: skip


def warn_of_gradients(graph: fx.Graph, rows: int) -> None:
    """Warn, of a captured step, of the first such function.  rows: of a microbatch."""
    nodes = [node for node in call_nodes(graph) if node.meta["origin"].backward]
    gradients = {*nodes[:1]}  # the gradient of the loss, and what follows from it
    for node in nodes:
        if packet_of(node) not in NO_NUMBERS and not gradients.isdisjoint(input_nodes(node)):
            gradients.add(node)
    hooked = next(_hooked(graph, gradients), None)
    joined = next((node for node in nodes if node in gradients and _is_of_rows(node)), None)
    hidden = next((node for node in _begun(graph, nodes, gradients) if _is_of_mean(node, rows)), None)
    if hooked is not None:
        name, node = hooked
        warnings.warn(
            f"A hook of the gradient of {printable(name)} is no linear function of it: {_text(node)}. A step "
            "runs it on what each microbatch adds, where plain torch runs it once, on the gradient of the "
            "whole batch. Change gradients in the loop, between pipe.step and the update "
            "(pipe.optimizer(…, changes_gradients=True), or clip_grad_norm=); "
            'mean="microbatch" of compile says that it is meant.',
            stacklevel=2,
        )
    elif joined is not None:
        warnings.warn(
            f"The backward takes a number of the gradients of all rows: {_text(joined)}. Each microbatch has "
            "its own, which is another one than the whole batch's. Take one of each row, or change the "
            'gradients of parameters in the loop; mean="microbatch" of compile says that it is meant.',
            stacklevel=2,
        )
    elif hidden is not None:
        warnings.warn(
            "The backward of an autograd.Function begins with a gradient of its own, of a mean over rows: "
            f"{_text(hidden)}. Each microbatch adds that of its mean, so a step has as many times the whole "
            "batch's as it has microbatches. Add that loss to the one that the model returns; "
            'mean="microbatch" of compile says that it is meant.',
            stacklevel=2,
        )


def _begun(graph: fx.Graph, nodes: Sequence[fx.Node], gradients: Collection[fx.Node]) -> Sequence[fx.Node]:
    """The ops that make what is added to gradients from a number that the backward begins with."""
    backward = {*nodes}
    of_autograd = (x for x in gradients if x.target is aten.add.Tensor and x.meta["origin"].seq is None)
    added = (x for node in of_autograd for x in input_nodes(node))
    ends = [x for x in (*added, *chain(*graph_outputs(graph).grads.values())) if x not in gradients]
    behind = leading_to(ends, lambda x: x in backward and x not in gradients)
    numbers = (x for x in behind if not x.all_input_nodes or packet_of(x) in NO_NUMBERS)
    return [x for x in nodes if x in behind] if any(x.meta["val"].numel() == 1 for x in numbers) else []


def _is_of_mean(node: fx.Node, rows: int) -> bool:
    """Whether an op of a backward may be that of a mean over rows, or divides by how many there are."""
    x, by, *_ = [*node.args, None, None]
    if packet_of(node) is not aten.div or isinstance(by, fx.Node):
        return packet_of(node) is aten.div or is_gradient_of_mean(node)
    if packet_of(x) is not aten.expand:  # type: ignore[arg-type]
        return by % rows == 0  # type: ignore[operator]
    before, after = shape_of(node_arg(x, 0)), shape_of(x)  # type: ignore[arg-type]
    return len(before) < len(after) or before[0] < after[0]


def _hooked(graph: fx.Graph, gradients: Container[fx.Node]) -> Iterator[tuple[str, fx.Node]]:
    """The ops of hooks of parameters that are not linear, each with the parameter's name."""
    for name, summands in graph_outputs(graph).grads.items():
        todo, seen = [*summands], set[fx.Node]()
        while todo:
            node = todo.pop()
            if node not in seen and node in gradients and _is_of_hook(node):
                seen.add(node)
                todo += node.all_input_nodes
                if not _is_linear(node, gradients):
                    yield name, node


def _is_of_hook(node: fx.Node) -> bool:
    """Whether code of the user runs an op in the backward, between two ops that autograd differentiates."""
    origin = node.meta["origin"]
    return bool(origin.backward and origin.seq is None and origin.source and input_nodes(node))


def _is_linear(node: fx.Node, gradients: Container[fx.Node]) -> bool:
    packet = packet_of(node)
    of_gradient = [x for x in node.args if isinstance(x, fx.Node) and x in gradients]
    if packet in (aten.add, aten.sub):
        return len(of_gradient) == 2
    if packet is aten.div:
        return of_gradient == [*node.args[:1]]
    if packet in (aten.where, aten.masked_fill):
        return node.args[0 if packet is aten.where else 1] not in gradients
    return packet in _LINEAR or (packet in _FACTORS and len(of_gradient) == 1)


def _is_of_rows(node: fx.Node) -> bool:
    """Whether an op makes a number of all rows."""
    packet = packet_of(node)
    if packet not in _OF_ALL:
        return False
    shape = next(iter(input_nodes(node))).meta["val"].shape
    dims = dims_of(node, len(shape))
    return bool(shape) and (dims is None or 0 in dims)


def _text(node: fx.Node) -> str:
    return f"{node.target.overloadpacket.__name__} ({node.meta['origin'].source})"  # type: ignore[union-attr]
