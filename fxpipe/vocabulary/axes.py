"""Finds the vocabulary dimension of every value that is computed from a table."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.errors import VocabularyError
from fxpipe.ir.graph import Kind
from fxpipe.ir.ops import SUM_OF_LANES
from fxpipe.ir.storage import call_nodes

aten = torch.ops.aten

LOOKUPS = {aten.embedding.default}
PICKS = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
UNPICKS = {aten.nll_loss_backward.default, aten.nll_loss2d_backward.default}
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
LINEAR = {  # in their first argument
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten._to_copy.default,
    aten.clone.default,
}
SLICES = {aten.slice.Tensor: 1, aten.slice_backward.default: 2}  # where their dimension is, then their bounds
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
    at, args = SLICES[node.target], (*node.args, *[None] * 5)
    # Padding can only stand for the last entries: the shards of the first ranks stay as they are.
    if (args[at] or 0) % node.meta["val"].dim() != axis or args[at + 1] or (args[at + 3] or 1) != 1:
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
    if node.target not in (aten.sum.default, aten.sum.dim_IntList) or not node.meta["origin"].backward:
        return False
    scaled: fx.Node = node.args[0]  # type: ignore[assignment]
    if scaled not in axes:
        return False
    # A sum without dimensions is over all of them.
    dims = [dim % scaled.meta["val"].dim() for dim in node.args[1]] if len(node.args) > 1 else [axes[scaled]]  # type: ignore
    return axes[scaled] in dims


def is_argmax(node: fx.Node, axes: dict[fx.Node, int]) -> bool:
    """Whether the largest entry over the vocabulary is asked for."""
    if node.target is not aten.argmax.default or node.args[0] not in axes or len(node.args) < 2:
        return False
    logits: fx.Node = node.args[0]  # type: ignore[assignment]
    return isinstance(node.args[1], int) and node.args[1] % logits.meta["val"].dim() == axes[logits]


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
    if node.target in LOOKUPS or node.target in PICKS or is_total(node, axes) or is_argmax(node, axes):
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
        return _MOVES[node.target](node, axes[args[0]])
    elif args[0] in axes and node.target in _AS_BEFORE:
        at = axes[args[0]]
        axis = at if leaves_out_columns(node, at) or entries(node, at) == entries(args[0], at) else None
    elif torch.Tag.pointwise in getattr(node.target, "tags", ()):
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


def _through_view(node: fx.Node, at: int) -> int:
    """The new index of a dimension that a reshape neither merges nor splits."""
    before: Sequence[int] = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    after: Sequence[int] = node.meta["val"].shape
    for k, length in enumerate(after):
        # As many elements before it: then it is the same dimension, whatever the others became.
        if length == before[at] and math.prod(after[:k]) == math.prod(before[:at]):
            return k
    raise whole(node)


def _through_transpose(node: fx.Node, at: int) -> int:
    if node.target is aten.t.default:
        return 1 - at
    one, other = (int(dim) % node.meta["val"].dim() for dim in node.args[1:])  # type: ignore[arg-type]
    swapped: dict[int, int] = {one: other, other: one}
    return swapped.get(at, at)


def _through_permute(node: fx.Node, at: int) -> int:
    before: Sequence[int] = node.args[1]  # type: ignore[assignment]
    return [dim % len(before) for dim in before].index(at)


def _through_select(node: fx.Node, at: int) -> int:
    dim: int = node.args[1] % node.args[0].meta["val"].dim()  # type: ignore
    if dim == at:
        raise whole(node)
    # The dimension that is taken out moves those behind it forward.
    return at - (dim < at)


def _through_select_backward(node: fx.Node, at: int) -> int:
    dim: int = node.args[2] % node.meta["val"].dim()
    return at + (dim <= at)


def _through_split(node: fx.Node, at: int) -> int:
    if (node.args[2] if len(node.args) > 2 else 0) % node.meta["val"][0].dim() == at:
        raise whole(node)
    return at


def _through_sum(node: fx.Node, at: int) -> int | None:
    before, dims = node.args[0].meta["val"].dim(), node.args[1]  # type: ignore[union-attr]
    summed = {dim % before for dim in dims}  # type: ignore
    if at in summed:
        return None
    keeps = len(node.args) > 2 and node.args[2]
    # So do those that are summed.
    return at if keeps else at - sum(dim < at for dim in summed)


_MOVES: dict[object, Callable[[fx.Node, int], int | None]] = {
    **dict.fromkeys(RESHAPES, _through_view),
    aten.t.default: _through_transpose,
    aten.transpose.int: _through_transpose,
    aten.permute.default: _through_permute,
    aten.select.int: _through_select,
    aten.select_backward.default: _through_select_backward,
    aten.split.Tensor: _through_split,
    aten.sum.dim_IntList: _through_sum,
    operator.getitem: lambda node, at: at,
}


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
