"""Writes the losses of tokens in forms that a head is split by, with their backwards.

The labels' entries of a log-softmax, where a model takes them by index, are a loss of each token.
before: gather(logs, -1, labels[…, None])         scatter_add(zeros, -1, labels[…, None], d_picked)
        index(logs, [arange, labels])             index_put(zeros, [arange, labels], d_picked, True)
after:  -nll_loss_forward(logs, labels, none)     nll_loss_backward(-d_picked, logs, labels, none)

The numbers are the same, bit for bit.  Losses of preferences and of policies are made of such entries.

So are those of the logits themselves beside their log-sum-exp, whose difference is that of a log-softmax.
before: gather(logits, -1, labels) - logsumexp(logits)     scatter_add(zeros, -1, labels, d) - d * softmax
after:  gather(log_softmax(logits), -1, labels)            log_softmax_backward(scatter_add(…), …)

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
from fxpipe.ir.storage import argument, call_nodes, drop_dead
from fxpipe.vocabulary.axes import EACH, MEAN, RESHAPES, SUM, entries, is_of_batch

aten = torch.ops.aten
_SAME_ELEMENTS = RESHAPES | {
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.alias.default,
    aten.detach.default,
}
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


def logits_as_logs(graph: fx.Graph) -> None:
    """Write labels' entries of logits, whose log-sum-exp is taken as well, as those of a log-softmax."""
    logsums = [*graph.find_nodes(op="call_function", target=aten.logsumexp.default)]
    for pick in graph.find_nodes(op="call_function", target=aten.gather.default):
        if pick.meta["origin"].backward or labels_of(pick) is None:
            continue
        logits = viewed(node_arg(pick, 0))
        for logsum in logsums:
            whole = node_arg(logsum, 0)
            if viewed(whole) is logits and logsum.args[1] in ([-1], [whole.meta["val"].dim() - 1]):
                _of_softmax(pick, logsum)
                break
    in_order(graph)
    drop_dead(graph)


def means_as_sums(graph: fx.Graph) -> None:
    """Write all means of tokens' losses, without weights of classes, as sums."""
    for loss in graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default):
        _, labels, weights, reduction, ignored = loss.args
        if reduction != MEAN or weights is not None:
            continue
        build = Builder(graph)
        build.origin = loss.meta["origin"]
        counted = build.call(aten.sum.default, build.call(aten.ne.Scalar, labels, ignored))
        number = build.call(aten._to_copy.default, counted, dtype=loss.meta["val"][0].dtype)
        loss.args = (*loss.args[:3], SUM, ignored)
        for total in [user for user in loss.users if user.args[1] == 0]:
            mean = build.call(aten.div.Tensor, total, number)
            total.replace_all_uses_with(mean, delete_user_cb=lambda user, mean=mean: user is not mean)
        for below in graph.find_nodes(op="call_function", target=aten.nll_loss_backward.default):
            if below.args[2:6] == (labels, weights, MEAN, ignored) and below.args[6] in loss.users:
                build.origin = below.meta["origin"]
                above = build.call(aten.div.Tensor, below.args[0], number)
                below.args = (above, *below.args[1:4], SUM, *below.args[5:])
    in_order(graph)


def _write(pick: fx.Node, logs: fx.Node, labels: fx.Node) -> None:
    """Put a loss of each token in the place of a pick, and its backward in that of the pick's."""
    build, shape = Builder(pick.graph), [*logs.meta["val"].shape]
    tokens = prod(shape[:-1])

    def viewed(value: fx.Node, into: Sequence[int]) -> fx.Node:
        before, after = [*value.meta["val"].shape], [*into]
        return value if before == after else build.call(aten.reshape.default, value, after)

    build.origin = pick.meta["origin"]
    settings = (viewed(logs, [tokens, shape[-1]]), viewed(labels, [tokens]), None, EACH, _IGNORED)
    loss = build.call(aten.nll_loss_forward.default, *settings)
    each, count = (build.call(operator.getitem, loss, item) for item in (0, 1))
    for put in [node for node in call_nodes(pick.graph) if _is_backward(node, pick)]:
        build.origin = put.meta["origin"]
        gradient = viewed(node_arg(put, _PUTS[pick.target].gradient), [tokens])
        above = build.call(aten.neg.default, gradient)
        _replace(put, viewed(build.call(aten.nll_loss_backward.default, above, *settings, count), shape))
    build.origin = pick.meta["origin"]
    _replace(pick, viewed(build.call(aten.neg.default, each), pick.meta["val"].shape))


def _of_softmax(pick: fx.Node, logsum: fx.Node) -> None:
    """Let a pick of logits be one of their log-softmax, and its sum with the log-sum-exp what it was.

    The gradient of that goes to the log-sum-exp as well, and most of it cancels.
    """
    nodes, build = call_nodes(pick.graph), Builder(pick.graph)
    puts = [node for node in nodes if _is_backward(node, pick)]
    slopes = [node for node in nodes if _is_slope(node, logsum)]
    if len(puts) != len(slopes):
        return  # the gradient of one of them alone
    shape, build.origin = [*pick.meta["val"].shape], pick.meta["origin"]
    logs = build.call(aten._log_softmax.default, pick.args[0], len(shape) - 1, False)
    total = build.call(aten.add.Tensor, pick, build.call(aten.reshape.default, logsum, shape))
    pick.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    pick.replace_input_with(node_arg(pick, 0), logs)
    for node in nodes:
        if node.target is not aten.sub.Tensor or node.kwargs or isinstance(node.args[1], float):
            continue
        sides = [viewed(x) if isinstance(x, fx.Node) else x for x in node.args]
        if {*sides} == {total, logsum} and node.meta["val"].numel() == prod(shape):
            build.origin = node.meta["origin"]
            each = pick if sides[0] is total else build.call(aten.neg.default, pick)
            _replace(node, build.call(aten.reshape.default, each, [*node.meta["val"].shape]))
    for put, slope in zip(puts, slopes, strict=True):
        _give_gradients(build, put, slope, logs)


def _give_gradients(build: Builder, put: fx.Node, slope: fx.Node, logs: fx.Node) -> None:
    """Let the gradient of a pick go to a log-softmax, and to the log-sum-exp, whose gradient of logits is
    ``slope``."""

    def like(value: fx.Node, other: fx.Node) -> fx.Node:
        return build.call(aten.reshape.default, value, [*other.meta["val"].shape])

    build.origin, val = put.meta["origin"], logs.meta["val"]
    below = build.call(aten._log_softmax_backward_data.default, put, logs, val.dim() - 1, val.dtype)
    put.replace_all_uses_with(below, delete_user_cb=lambda user: user is not below)
    take_name(below, put)
    build.origin = slope.meta["origin"]
    gradient, picked = node_arg(slope, 0), node_arg(put, 3)
    left = _without(gradient, picked)
    if left is None:
        left = [gradient, picked]
    if not left and _take_out(slope):
        return
    rest = like(left[0], gradient) if left else build.call(aten.zeros_like.default, gradient)
    for other in left[1:]:
        rest = build.call(aten.add.Tensor, rest, like(other, gradient))
    slope.replace_input_with(gradient, rest)


def viewed(node: fx.Node) -> fx.Node:
    """The value whose elements a node has, in their order."""
    while node.target in _SAME_ELEMENTS:
        node = node_arg(node, 0)
    return node


def _is_slope(node: fx.Node, logsum: fx.Node) -> bool:
    """Whether an op is the gradient of logits that their log-sum-exp gives: its own times their softmax."""
    origin = node.meta["origin"]
    if node.target is not aten.mul.Tensor or not origin.backward or origin.seq != logsum.meta["origin"].seq:
        return False
    return isinstance(node.args[1], fx.Node) and node.args[1].target is aten.exp.default


def _without(gradient: fx.Node, other: fx.Node) -> list[fx.Node] | None:
    """The summands of a gradient but for the negative of another one; None if that is not among them."""
    other = viewed(other)
    todo: list[tuple[fx.Node, list[fx.Node]]] = [(gradient, [])]
    while todo:  # no recursion: a value has a summand for each of its uses
        summand, left = viewed(todo[-1][0]), todo.pop()[1]
        for one, two in ((summand, other), (other, summand)):
            if one.target is aten.neg.default and viewed(node_arg(one, 0)) is two:
                return left
        if summand.target is aten.add.Tensor and not summand.kwargs:
            first, second = (node_arg(summand, k) for k in (0, 1))
            todo += [(second, [first, *left]), (first, [second, *left])]
    return None


def _take_out(summand: fx.Node) -> bool:
    """Take a value out of all sums that it is in; False, and nothing done, where it is in something else."""
    sums = [user for user in summand.users if user.target is aten.add.Tensor and not user.kwargs]
    if len(sums) < len(summand.users):
        return False
    for total in sums:
        (other,) = (x for x in total.all_input_nodes if x is not summand)
        _replace(total, other)
    return True


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
