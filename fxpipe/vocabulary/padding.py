"""Gives logits without the last columns of a padded table these columns back, masked.

before: logits[..., :n] ──► log_softmax;   d_log_softmax ──► slice_backward
after:  logits ──► masked_fill(arange >= n, -inf) ──► log_softmax;   d_log_softmax ──► masked_fill(…, 0)

So each value has the vocabulary's length, and a shard may have nothing but padding.  The mask is where
entries of several columns meet first, behind all ops on single ones.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.builder import Builder, in_order, node_arg
from fxpipe.ir.dims import is_pointwise
from fxpipe.vocabulary.axes import (
    entries,
    is_argmax,
    is_logsumexp,
    is_of_batch,
    is_uniform,
    leaves_out_columns,
    whole,
)

aten = torch.ops.aten


def pad(
    graph: fx.Graph, axes: dict[fx.Node, int], size: int
) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """The dimension of the vocabulary in each value of the new graph, and how long it was where it was
    shorter."""
    shorter = {node: length for node, at in axes.items() if (length := entries(node, at)) < size}
    if not shorter:
        return axes, {}
    padding = _Padding(graph, axes, size, shorter)
    # Dropping columns first, so that all values have the table's length, and shards of it have the same
    # bounds.
    for node in [n for n, at in axes.items() if leaves_out_columns(n, at)]:
        padding.drop(node)
    for node in shorter.keys() & axes.keys():
        padding.lengthen(node)
    padding.mask()
    in_order(graph)
    return {node: axes[node] for node in graph.nodes if node in axes}, shorter


class _Padding:
    def __init__(
        self, graph: fx.Graph, axes: dict[fx.Node, int], size: int, shorter: dict[fx.Node, int]
    ) -> None:
        self.graph, self.axes, self.size, self.shorter = graph, axes, size, shorter
        self._build = Builder(graph)
        self._masks: dict[int, fx.Node] = {}
        #: What reads entries of several columns -> how many there are.
        self._readers = {
            node: shorter[logits]
            for logits in shorter
            for node in logits.users
            if node.target is aten._log_softmax.default
            or is_argmax(node, axes)
            or _is_of_logsumexp(node, axes)
        }
        #: Lengths of log-softmaxes that have a gradient in every entry, those of the padding too.
        self._smoothed = {
            length for n, length in shorter.items() if is_uniform(n, axes[n] - n.meta["val"].dim())
        }

    def drop(self, node: fx.Node) -> None:
        node.replace_all_uses_with(node_arg(node, 0))
        self.graph.erase_node(node)
        del self.axes[node]

    def lengthen(self, node: fx.Node) -> None:
        """The value of a node, and of operands with an entry for each of its columns."""
        val, axis = node.meta["val"], self.axes[node]
        if is_pointwise(node):
            place = axis - val.dim()
            for n in node.all_input_nodes:
                other = n.meta["val"]
                # A mask or weights of each word, which must be as long as the logits are now.
                if n not in self.axes and other.dim() >= -place and other.shape[place] == val.shape[axis] > 1:
                    node.replace_input_with(n, self._operand(n, node, place))
        many = isinstance(val, list | tuple)
        node.meta["val"] = [self._empty(v, axis) for v in val] if many else self._empty(val, axis)

    def _empty(self, val: torch.Tensor, axis: int) -> torch.Tensor:
        return val.new_empty([*val.shape[:axis], self.size, *val.shape[axis + 1 :]])

    def _operand(self, n: fx.Node, user: fx.Node, place: int) -> fx.Node:
        """What it is for the padding decides nothing, but must not make it infinite or NaN."""
        if not is_of_batch(n):
            raise whole(user)
        val, self._build.origin = n.meta["val"], user.meta["origin"]
        ends = [0, 0] * (-place - 1) + [0, self.size - val.shape[place]]
        return self._build.call(aten.constant_pad_nd.default, n, ends, 0 if val.dtype == torch.bool else 1)

    def mask(self) -> None:
        """Mask the padding where entries of several columns meet, and in a log-softmax's gradient."""
        masked: dict[tuple[fx.Node, int], fx.Node] = {}
        for node, length in self._readers.items():
            logits = node_arg(node, 0)
            # Several readers of the same columns share the mask.
            if (logits, length) not in masked:
                masked[logits, length] = self._fill(logits, length, -torch.inf, node)
            node.replace_input_with(logits, masked[logits, length])
        for node, length in self.shorter.items():
            if node.target is aten._log_softmax_backward_data.default and length in self._smoothed:
                users = list(node.users)
                zeroed = self._fill(node, length, 0, node)
                for user in users:
                    user.replace_input_with(node, zeroed)

    def _fill(self, value: fx.Node, length: int, filler: float, place: fx.Node) -> fx.Node:
        axis, val = self.axes[value], value.meta["val"]
        self._build.origin = place.meta["origin"]
        if length not in self._masks:
            index = self._build.call(aten.arange.default, self.size, device=val.device)
            self._masks[length] = self._build.call(aten.ge.Scalar, index, length)
        # It is broadcast over the tokens.
        shape: list[object] = [1] * (val.dim() - axis)
        shape[0] = self.size
        mask = self._build.call(aten.view.default, self._masks[length], shape)
        filled = self._build.call(aten.masked_fill.Scalar, value, mask, filler)
        self.axes[filled] = axis
        return filled


def _is_of_logsumexp(node: fx.Node, axes: dict[fx.Node, int]) -> bool:
    """Whether it is a log-sum-exp of logits, or makes their distances to one for its gradient."""
    if node.target is not aten.sub.Tensor:
        return is_logsumexp(node, axes)
    origin, logits = node.meta["origin"], node_arg(node, 0)
    of = {n.meta["origin"].seq for n in logits.users if is_logsumexp(n, axes)}
    return bool(origin.backward and origin.seq in of)
