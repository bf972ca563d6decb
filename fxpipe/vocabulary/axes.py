"""Finds the vocabulary dimension of every value that is computed from a table."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxpipe.errors import VocabularyError
from fxpipe.ir.dims import Lost, dims_of, is_pointwise, through
from fxpipe.ir.graph import Kind
from fxpipe.ir.ops import SUM_OF_LANES
from fxpipe.ir.storage import argument, call_nodes

aten = torch.ops.aten

LOOKUPS = {aten.embedding.default}
PICKS = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
UNPICKS = {aten.nll_loss_backward.default, aten.nll_loss2d_backward.default}
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
EACH, MEAN, SUM = 0, 1, 2  # reductions of a loss, as torch numbers them
LINEAR = {  # in their first argument
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten._to_copy.default,
    aten.clone.default,
}
SLICES = {aten.slice.Tensor, aten.slice_backward.default}
_OF_COLUMNS = {
    *SLICES,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.cat.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.index_put.default,
    aten.index_fill.int_Scalar,
    aten.constant_pad_nd.default,
}
_MOVES = RESHAPES | {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.select.int,
    aten.select_backward.default,
    aten.split.Tensor,
    aten.sum.dim_IntList,
    operator.getitem,
}
_AS_BEFORE = {  # where they leave the vocabulary's dimension whole
    *SLICES,
    aten.constant_pad_nd.default,
    aten.clone.default,
    aten.detach.default,
    aten._to_copy.default,
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    SUM_OF_LANES,
}


def vocabulary_axes(graph: fx.Graph, tables: set[fx.Node]) -> dict[fx.Node, int]:
    """The index of the vocabulary dimension, for every value that has one.

    tables: placeholders whose first dimension is the vocabulary.  Results of sums over the vocabulary
    (lookups, matrix products, picked entries) have none.  Raises VocabularyError for an op that needs the
    whole vocabulary in one place.
    """
    size = next(iter(tables)).meta["val"].shape[0]
    axes: dict[fx.Node, int] = dict.fromkeys(tables, 0)
    for node in call_nodes(graph):
        if any(n in axes for n in node.all_input_nodes):
            axis = _axis(node, axes)
        else:
            axis = 0 if _is_gradient_of_lookup(node, tables, size) else None
        if axis is not None:
            axes[node] = axis
    return axes


def is_uniform(node: fx.Node, dim: int) -> bool:
    """Whether the value is expanded from one element along a dimension (counted from the last)."""
    if node.target is not aten.expand.default:
        return False
    before: torch.Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    return before.dim() < -dim or before.shape[dim] == 1


def entries(node: fx.Node, axis: int) -> int:
    """The length of a dimension of a value, or of each of its values."""
    val = node.meta["val"]
    length: int = (val[0] if isinstance(val, list | tuple) else val).shape[axis]
    return length


def leaves_out_columns(node: fx.Node, axis: int) -> bool:
    """Whether an op leaves out the last entries of the vocabulary, or is the gradient of one that does.

    Raises VocabularyError if it leaves out others.
    """
    if node.target not in SLICES or entries(node, axis) == entries(node.args[0], axis):  # type: ignore[arg-type]
        return False
    # Padding can only stand for the last entries: the shards of the first ranks stay as they are.
    is_of_last = not argument(node, "start") and argument(node, "step") == 1
    if dims_of(node, node.meta["val"].dim()) != {axis} or not is_of_last:
        raise whole(node)
    return True


def is_of_batch(node: fx.Node) -> bool:
    """Whether a value depends on the batch and constants alone, so that every rank can compute it."""
    seen, todo = {node}, [node]
    while todo:
        each = todo.pop()
        if each.op == "placeholder" and each.meta["input"].kind not in (Kind.BATCH, Kind.CONSTANT):
            return False  # also the key of a random op
        # Values have many users in common, and each is looked at once.
        todo += set(each.all_input_nodes) - seen
        seen.update(todo)
    return True


def is_total(node: fx.Node, axes: dict[fx.Node, int]) -> bool:
    """Whether a gradient is summed over the vocabulary: of what scales the logits of a token, or of all."""
    is_sum = node.target in (aten.sum.default, aten.sum.dim_IntList) and node.meta["origin"].backward
    scaled: fx.Node = node.args[0]  # type: ignore[assignment]
    return is_sum and scaled in axes and through(node, scaled, axes[scaled]) is Lost.SUMMED


def is_argmax(node: fx.Node, axes: dict[fx.Node, int]) -> bool:
    """Whether the largest entry over the vocabulary is asked for."""
    return node.target is aten.argmax.default and _is_of_logits(node, axes)


def is_logsumexp(node: fx.Node, axes: dict[fx.Node, int]) -> bool:
    """Whether the logarithm of the sum of exponentials over the vocabulary is asked for."""
    return node.target is aten.logsumexp.default and _is_of_logits(node, axes)


def _is_of_logits(node: fx.Node, axes: dict[fx.Node, int]) -> bool:
    """Whether an op goes along the vocabulary alone."""
    logits: fx.Node = node.args[0]  # type: ignore[assignment]
    return logits in axes and dims_of(node, logits.meta["val"].dim()) == {axes[logits]}


def whole(node: fx.Node) -> VocabularyError:
    """The error for an op that needs the whole vocabulary in one place."""
    origin = node.meta["origin"]
    remedy = "Compile without vocab_parallel, or drop that use from the training step."
    if node.target in _OF_COLUMNS:
        remedy = (
            "To leave out columns of the logits, take the first ones, logits[..., :n], or mask others: "
            "logits.masked_fill(mask, -torch.inf), with a mask of the vocabulary's length."
        )
    return VocabularyError(
        f"vocab_parallel cannot split {node.target} in {origin.module} "
        f"({origin.source or 'autograd'}): it uses the logits, or the table, beside the projection and the "
        f"cross-entropy. {remedy}"
    )


def _is_gradient_of_lookup(node: fx.Node, tables: set[fx.Node], size: int) -> bool:
    """Whether a node is the gradient of a lookup, which has a vocabulary dimension but no such input."""
    # The number of rows, its third argument, tells it from the gradient of another table.
    if node.target is not aten.embedding_dense_backward.default or node.args[2] != size:
        return False
    users = [user for table in tables for user in table.users]
    return any(u.target in LOOKUPS and u.meta["origin"].seq == node.meta["origin"].seq for u in users)


def _axis(node: fx.Node, axes: dict[fx.Node, int]) -> int | None:
    """The vocabulary's dimension in the result of an op on values that have one; None if it is summed."""
    if node.target in LOOKUPS or node.target in PICKS or is_total(node, axes):
        return None
    if is_argmax(node, axes) or is_logsumexp(node, axes):
        return None
    args: tuple[Any, ...] = node.args
    if node.target is aten.mm.default:
        axis, summed = _product(axes.get(args[0]), axes.get(args[1]))
        if summed:
            return None
    elif node.target is aten.addmm.default:
        axis, summed = _product(axes.get(args[1]), axes.get(args[2]))
        # A bias that is not split would be added by each rank to its own columns alone.
        if summed or args[0] not in axes:  # the added value is the bias of every entry
            axis = None
    elif node.target is aten.cat.default:
        axis = _of_joined(node, [axes.get(n) for n in args[0]])
    elif node.target in UNPICKS:
        axis = axes.get(args[1])
    elif args[0] in axes and node.target in _MOVES:
        place = through(node, args[0], axes[args[0]])
        if place is Lost.SUMMED:
            return None
        axis = place if isinstance(place, int) else None
    elif args[0] in axes and node.target in _AS_BEFORE:
        at = axes[args[0]]
        axis = at if leaves_out_columns(node, at) or entries(node, at) == entries(args[0], at) else None
    elif is_pointwise(node):
        axis = _of_operands(node, axes)
    else:
        axis = None
    if axis is None:
        # An op that is not known may read the whole vocabulary, so it is refused, and not guessed at.
        raise whole(node)
    return axis


def _product(left: int | None, right: int | None) -> tuple[int | None, bool]:
    """The vocabulary's dimension in a matrix product, and whether the product sums over it."""
    if (left, right) == (1, 0):
        return None, True
    if left == 0 and right is None:
        return 0, False
    if left is None and right == 1:
        return 1, False
    return None, False


def _of_joined(node: fx.Node, axes: list[int | None]) -> int | None:
    along = (node.args[1] if len(node.args) > 1 else 0) % node.meta["val"].dim()
    # Joined along the vocabulary, the columns of a rank would be no shard of the result.
    return axes[0] if len(set(axes)) == 1 and axes[0] != along else None


def _of_operands(node: fx.Node, axes: dict[fx.Node, int]) -> int | None:
    """The vocabulary dimension of broadcast operands, aligned at their last dimensions.  An operand without
    one must be uniform along it, or available on every rank."""
    places = {axes[n] - n.meta["val"].dim() for n in node.all_input_nodes if n in axes}
    # Two operands with the vocabulary in different dimensions make a matrix of words by words.
    if len(places) != 1:
        return None
    (place,) = places
    for n in node.all_input_nodes:
        val = n.meta["val"]
        if n in axes or val.dim() < -place or val.shape[place] == 1:
            continue
        if is_uniform(n, place):
            # Its part is the same value expanded to fewer columns.
            axes[n] = val.dim() + place
        elif n.op != "placeholder" and not is_of_batch(n):
            return None
    dims: int = node.meta["val"].dim()
    axis: int = dims + place
    return axis
