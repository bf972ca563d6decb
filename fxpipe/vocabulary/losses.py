"""Writes the losses of tokens in forms that a head is split by, with their backwards.

The labels' entries of a log-softmax, where a model takes them by index, are a loss of each token.
before: gather(logs, -1, labels[…, None])         scatter_add(zeros, -1, labels[…, None], d_picked)
        index(logs, [arange, labels])             index_put(zeros, [arange, labels], d_picked, True)
after:  -nll_loss_forward(logs, labels, none)     nll_loss_backward(-d_picked, logs, labels, none)

The numbers are the same, bit for bit.  Losses of preferences and of policies are made of such entries.

A mean, where parts of the tokens have sums, is a sum divided by the labels that count.
before: nll_loss_forward(logs, labels, mean)      nll_loss_backward(d_loss, logs, labels, mean)
after:  nll_loss_forward(logs, labels, sum) / n   nll_loss_backward(d_loss / n, logs, labels, sum)
        where n = sum(ne(labels, -100))
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from fxpipe.ir.builder import Builder, in_order, node_arg
from fxpipe.ir.nodes import take_name
from fxpipe.ir.storage import argument, call_nodes
from fxpipe.vocabulary.axes import RESHAPES, entries, is_of_batch

aten = torch.ops.aten
_EACH, _MEAN, _SUM = 0, 1, 2  # reductions of a loss
#: No label: each of them is to be an index, as in the op that is replaced.
_IGNORED = -(1 << 62)


class _Put(NamedTuple):
    """The op that puts gradients in their places, and where it has them among its arguments."""

    target: object
    gradient: int


#: What takes entries -> what does the same in its backward.
_PUTS: dict[object, _Put] = {
    aten.gather.default: _Put(aten.scatter_add.default, 3),
    aten.index.Tensor: _Put(aten.index_put.default, 2),
}


def labels_of(pick: fx.Node) -> fx.Node | None:
    """The indices, of the batch alone, by which an op takes one entry of each row of its argument; None for
    another op."""
    if pick.target not in _PUTS:
        return None
    rows, last = node_arg(pick, 0).meta["val"], node_arg(pick, 0).meta["val"].dim() - 1
    if pick.target is aten.gather.default:
        labels, expected = node_arg(pick, 2), (*rows.shape[:-1], 1)
        if pick.args[1] not in (last, -1):
            return None
    else:
        indices: Any = pick.args[1]
        if last != 1 or len(indices) != 2 or None in indices or not _counts_rows(indices[0], rows.shape[0]):
            return None
        labels, expected = indices[1], rows.shape[:1]
    is_one = labels.meta["val"].dtype == torch.int64 and labels.meta["val"].shape == torch.Size(expected)
    return labels if is_one and is_of_batch(labels) else None


def picks_as_losses(graph: fx.Graph) -> None:
    """Write all picks of log-softmaxes, and their backwards, as losses."""
    for softmax in graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        if softmax.args[1] not in (-1, softmax.meta["val"].dim() - 1):
            continue
        todo = [softmax]
        while todo:
            logs = todo.pop()
            for user in [*logs.users]:
                if user.target in RESHAPES and entries(user, -1) == entries(logs, -1):
                    todo.append(user)
                elif user.args[0] is logs and (labels := labels_of(user)) is not None:
                    _write(user, logs, labels)
    in_order(graph)


def means_as_sums(graph: fx.Graph) -> None:
    """Write all means of tokens' losses, without weights of classes, as sums."""
    for loss in graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default):
        _, labels, weights, reduction, ignored = loss.args
        if reduction != _MEAN or weights is not None:
            continue
        build = Builder(graph)
        build.origin = loss.meta["origin"]
        counted = build.call(aten.sum.default, build.call(aten.ne.Scalar, labels, ignored))
        number = build.call(aten._to_copy.default, counted, dtype=loss.meta["val"][0].dtype)
        loss.args = (*loss.args[:3], _SUM, ignored)
        for total in [user for user in loss.users if user.args[1] == 0]:
            mean = build.call(aten.div.Tensor, total, number)
            total.replace_all_uses_with(mean, delete_user_cb=lambda user, mean=mean: user is not mean)
        for below in graph.find_nodes(op="call_function", target=aten.nll_loss_backward.default):
            if below.args[2:6] == (labels, weights, _MEAN, ignored) and below.args[6] in loss.users:
                build.origin = below.meta["origin"]
                above = build.call(aten.div.Tensor, below.args[0], number)
                below.args = (above, *below.args[1:4], _SUM, *below.args[5:])
    in_order(graph)


def _write(pick: fx.Node, logs: fx.Node, labels: fx.Node) -> None:
    """Put a loss of each token in the place of a pick, and its backward in that of the pick's."""
    build, shape = Builder(pick.graph), [*logs.meta["val"].shape]
    tokens = prod(shape[:-1])

    def viewed(value: fx.Node, into: Sequence[int]) -> fx.Node:
        before, after = [*value.meta["val"].shape], [*into]
        return value if before == after else build.call(aten.reshape.default, value, after)

    build.origin = pick.meta["origin"]
    settings = (viewed(logs, [tokens, shape[-1]]), viewed(labels, [tokens]), None, _EACH, _IGNORED)
    loss = build.call(aten.nll_loss_forward.default, *settings)
    each, count = (build.call(operator.getitem, loss, item) for item in (0, 1))
    for put in [node for node in call_nodes(pick.graph) if _is_backward(node, pick)]:
        build.origin = put.meta["origin"]
        gradient = viewed(node_arg(put, _PUTS[pick.target].gradient), [tokens])
        above = build.call(aten.neg.default, gradient)
        _replace(put, viewed(build.call(aten.nll_loss_backward.default, above, *settings, count), shape))
    build.origin = pick.meta["origin"]
    _replace(pick, viewed(build.call(aten.neg.default, each), pick.meta["val"].shape))


def _replace(old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    take_name(new, old)
    old.graph.erase_node(old)


def _is_backward(node: fx.Node, pick: fx.Node) -> bool:
    """Whether an op puts the gradients of picked entries among zeros: that of the same call of the model."""
    put, at = _PUTS[pick.target], len(pick.args)
    origin = node.meta["origin"]
    if node.target is not put.target or not origin.backward or origin.seq != pick.meta["origin"].seq:
        return False
    return node_arg(node, 0).target is aten.new_zeros.default and node.args[1:at] == pick.args[1:]


def _counts_rows(node: object, rows: int) -> bool:
    """Whether a value is 0, 1, …, rows - 1."""
    if not isinstance(node, fx.Node) or not str(node.target).startswith("aten.arange"):
        return False
    start, step = argument(node, "start", 0), argument(node, "step", 1)
    return (start, argument(node, "end"), step) == (0, rows, 1)
