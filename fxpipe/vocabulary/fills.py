"""Writes a number that the model fills into columns of the logits, in place, as a mask.

before: logits[..., n:] = -inf:   slice_scatter(logits, fill(slice(logits, n, …), -inf), n, …)
after:  masked_fill(logits, arange >= n, -inf)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpipe.ir.builder import Builder, in_order, node_arg
from fxpipe.ir.storage import call_nodes, drop_dead
from fxpipe.vocabulary.axes import is_of_batch

aten = torch.ops.aten
_SCATTERS = {aten.slice_scatter.default, aten.select_scatter.default}


def mask_filled_columns(graph: fx.Graph, lengths: set[int]) -> None:
    """Turn numbers that are filled into columns of the vocabulary into masks.  lengths: those of the
    vocabulary; dimensions of other lengths remain as they are."""
    build, before = Builder(graph), len(graph.nodes)
    for node in call_nodes(graph):
        if node.target in _SCATTERS:
            _mask(node, lengths, build)
        elif node.target is aten.copy.default:
            _clone(node, build)
    # Else nothing was found, and the order of the nodes is as it was.
    if len(graph.nodes) > before:
        in_order(graph)
        drop_dead(graph)


def _mask(node: fx.Node, lengths: set[int], build: Builder) -> None:
    """Let a mask take the place of a scatter of one number."""
    val, filler = node.meta["val"], _number(node_arg(node, 1))
    args: tuple[Any, ...] = (*node.args[2:], *[None] * 4)
    dim, first, last, step = args[:4]
    size: int = val.shape[dim or 0]
    # Only a mask along the vocabulary has to be cut in shards.
    if filler is None or size not in lengths or (step or 1) != 1:
        return
    begin, end, _ = slice(first, last).indices(size)
    if node.target is aten.select_scatter.default:
        begin, end = first % size, first % size + 1
    build.origin = node.meta["origin"]
    # By index and not as a constant: a constant of this length would be saved with the pipeline.
    index = build.call(aten.arange.default, size, device=val.device)
    mask = build.call(aten.ge.Scalar, index, begin)
    if end < size:
        mask = build.call(aten.logical_and.default, mask, build.call(aten.lt.Scalar, index, end))
    mask = build.call(aten.view.default, mask, [size, *[1] * (val.dim() - (dim or 0) % val.dim() - 1)])
    before = node_arg(node, 0)
    if isinstance(filler, fx.Node):
        after = build.call(aten.where.self, mask, filler, before)
    else:
        after = build.call(aten.masked_fill.Scalar, before, mask, filler)
    node.replace_all_uses_with(after)


def _number(node: fx.Node) -> fx.Node | float | None:
    """The number, or the value of one number, in each entry of a value; None if there is no such."""
    match node.target:
        case aten.fill.Scalar | aten.full_like.default | aten.full.default:
            return node.args[1]  # type: ignore[return-value]
        case aten.zeros_like.default | aten.zeros.default:
            return 0
        case aten.copy.default | aten.fill.Tensor:
            return _number(node_arg(node, 1))
        case aten.expand.default | aten.clone.default:
            return _number(node_arg(node, 0))
    is_number = node.meta["val"].dim() == 0 and is_of_batch(node)
    return node if is_number else None


def _clone(node: fx.Node, build: Builder) -> None:
    """Make a clone of a copy over a whole value, as autograd has it for what is written in place."""
    source, build.origin = node_arg(node, 1), node.meta["origin"]
    val, other = node.meta["val"], source.meta["val"]
    if (val.shape, val.dtype) == (other.shape, other.dtype):
        node.replace_all_uses_with(
            build.call(aten.clone.default, source, memory_format=torch.contiguous_format)
        )
