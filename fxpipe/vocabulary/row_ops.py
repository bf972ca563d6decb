"""How the ops of a head are made for some of its tokens, and which are not known."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from math import prod
from typing import Any

import torch
from torch import fx

from fxpipe.errors import VocabularyError
from fxpipe.ir.builder import Builder, node_arg
from fxpipe.ir.dims import dims_of
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.storage import place_of
from fxpipe.vocabulary.axes import EACH, MEAN, RESHAPES, SUM
from fxpipe.vocabulary.part_builder import PartBuilder, Shape, is_elementwise

aten = torch.ops.aten
_SHAPES = RESHAPES | {aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default}
_TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}
_SAME = {aten.clone.default, aten.detach.default, aten.alias.default}
_ALONG = {  # the words, or, as sums, the tokens
    aten._log_softmax.default, aten._log_softmax_backward_data.default, aten._softmax.default,
    aten._softmax_backward_data.default, aten.amax.default, aten.argmax.default, aten.logsumexp.default,
    aten.mean.dim, aten.slice.Tensor, aten.sum.dim_IntList,
}  # fmt: skip
_AT_INDEX = {aten.gather.default, aten.scatter_add.default}

Part = Callable[[PartBuilder, Mapping[fx.Node, fx.Node]], fx.Node]
"""Makes an op on the tokens of a part.  The mapping has what the ops of the head before it give there."""
Total = Callable[[Builder, Sequence[fx.Node]], fx.Node]
"""Makes a value of all tokens from those of the parts."""


def joined(build: Builder, parts: Sequence[fx.Node]) -> fx.Node:
    return build.call(aten.cat.default, [*parts])


def added(build: Builder, parts: Sequence[fx.Node]) -> fx.Node:
    return reduce(partial(build.call, aten.add.Tensor), parts)


class RowOps:
    """The ops behind a projection that work on rows of tokens.

    ``tails``: of each value with rows of tokens its dimensions behind those of the tokens; None where the
    tokens are the columns of a matrix.  ``parts``: how each op is made.  ``totals``: what leaves the head.
    """

    def __init__(self, projection: fx.Node) -> None:
        self.tokens: int = projection.meta["val"].shape[0]
        self.tails: dict[fx.Node, Shape | None] = {projection: (projection.meta["val"].shape[1],)}
        at = 1 if projection.target is aten.addmm.default else 0
        before, x, behind = projection.args[:at], node_arg(projection, at), projection.args[at + 1 :]
        self.parts: dict[fx.Node, Part] = {
            projection: lambda build, here: build.like(projection, *before, build.rows(x, 0), *behind)
        }
        self.totals: dict[fx.Node, Total] = {}

    def take(self, node: fx.Node) -> bool:
        """Take an op on values of the head into it, if it is known."""
        part = self._part(node)
        if part is not None:
            self.parts[node] = part
        return part is not None

    def let_out(self, value: fx.Node, user: fx.Node) -> None:
        """Let a value leave the head that has one number a token."""
        if self.is_wide(value):
            raise refused(user, "takes the logits of all tokens")
        self.totals[value] = joined

    def is_wide(self, value: fx.Node) -> bool:
        """Whether a value of the head has more than one number a token."""
        tail = self.tails[value]
        return tail is None or prod(tail) > 1

    def tail(self, node: fx.Node) -> Shape | None:
        """The dimensions behind those of the tokens."""
        shape = tuple(node.meta["val"].shape)
        at = next((k for k in range(len(shape) + 1) if prod(shape[:k]) == self.tokens), None)
        return None if at is None else shape[at:]

    def _part(self, node: fx.Node) -> Part | None:
        target: Any = node.target
        args: tuple[Any, ...] = node.args
        if target is aten.mm.default:
            return self._product(node)
        if target is aten.nll_loss_forward.default and args[3] in (SUM, EACH):
            logs, labels, *others = args
            return self._with(
                node, (), lambda build, here: build.like(node, here[logs], build.rows(labels, 0), *others)
            )
        if target is aten.nll_loss_forward.default and args[3] == MEAN:
            raise refused(node, "divides by the weights of the labels of all tokens")
        if target is aten.nll_loss_backward.default and args[1] in self.tails:
            return self._unpicked(node)
        if is_elementwise(node):
            return self._pointwise(node)
        source = args[0]
        if source not in self.tails:
            return None
        tail = self.tails[source]
        if target is operator.getitem:
            return self._item(node)
        if target in _SAME:
            return self._with(node, tail, lambda build, here: here[source])
        if target in _TRANSPOSES and node.meta["val"].dim() == 2:
            tail = None if tail is not None else (node.meta["val"].shape[1],)
            return self._with(node, tail, lambda build, here: build.like(node, here[source], *args[1:]))
        if tail is None:
            return None
        if target in _SHAPES or (target is aten.select.int and source.meta["val"].shape[args[1]] == 1):
            return self._shaped(node)
        if target in _AT_INDEX:
            return self._at_index(node)
        if target in (aten.sum.default, aten.mean.default):
            # A mean of parts, which may differ in length, is no mean of all: each part gives its sum.
            over = source.meta["val"].numel() if target is aten.mean.default else 1
            dtype = dict(node.kwargs)
            return self._total(
                node, over, lambda build, here: build.like(node, here[source], op=aten.sum.default, **dtype)
            )
        return self._along(node) if target in _ALONG else None

    def _with(self, node: fx.Node, tail: Shape | None, part: Part) -> Part:
        self.tails[node] = tail
        return part

    def _total(self, node: fx.Node, over: int, part: Part) -> Part:
        def total(build: Builder, parts: Sequence[fx.Node]) -> fx.Node:
            sum_of_parts = added(build, parts)
            return sum_of_parts if over == 1 else build.call(aten.div.Scalar, sum_of_parts, over)

        self.totals[node] = total
        return part

    def _product(self, node: fx.Node) -> Part | None:
        """The end of the head: the gradient of x, or of a table, which is a sum over the tokens."""
        left, right = node_arg(node, 0), node_arg(node, 1)
        if left in self.tails and right in self.tails:
            return None
        # The columns of the left matrix are tokens: a sum over them.
        if left not in self.tails:
            if self.tails[right] is None:
                return None
            return self._total(
                node, 1, lambda build, here: build.like(node, build.rows(left, 1), here[right])
            )
        if self.tails[left] is None:
            return self._total(
                node, 1, lambda build, here: build.like(node, here[left], build.rows(right, 0))
            )
        self.totals[node] = joined
        return lambda build, here: build.like(node, here[left], right)

    def _unpicked(self, node: fx.Node) -> Part:
        args: tuple[Any, ...] = node.args
        gradient, logs, labels, *others, count = args
        each = others[1] == EACH

        def part(build: PartBuilder, here: Mapping[fx.Node, fx.Node]) -> fx.Node:
            above = here.get(gradient) or (build.rows(gradient, 0) if each else gradient)
            return build.like(node, above, here[logs], build.rows(labels, 0), *others, here.get(count, count))

        return self._with(node, self.tails[logs], part)

    def _pointwise(self, node: fx.Node) -> Part | None:
        tail, shape = self.tail(node), tuple(node.meta["val"].shape)
        inside = [x for x in input_nodes(node) if x in self.tails]
        if tail is None or any(self.tails[x] is None or x.meta["val"].dim() != len(shape) for x in inside):
            return None
        return self._with(node, tail, self._of_operands(node, tail))

    def _of_operands(self, node: fx.Node, tail: Shape, dim: int | None = None) -> Part:
        """The op on the parts of operands whose first dimensions are the tokens, or are broadcast to them.

        dim: along which it is made, if it names a dimension: in a part the tokens are one dimension.
        """
        shape = tuple(node.meta["val"].shape)
        tokens = shape[: len(shape) - len(tail)]

        def part(build: PartBuilder, here: Mapping[fx.Node, fx.Node]) -> fx.Node:
            args, kwargs = fx.map_arg(
                (node.args, dict(node.kwargs)), lambda x: here.get(x) or build.operand(x, tokens, len(tail))
            )
            if dim is not None:
                at = place_of(node, "dim")
                args = (*args[:at], dim, *args[at + 1 :])
            return build.like(node, *args, **kwargs)

        return part

    def _at_index(self, node: fx.Node) -> Part | None:
        """An op on the words of each token that another operand names."""
        tail, rank = self.tail(node), node.meta["val"].dim()
        if not tail or not self.tails[node_arg(node, 0)] or dims_of(node, rank) != {rank - 1}:
            return None
        return self._with(node, tail, self._of_operands(node, tail, len(tail)))

    def _item(self, node: fx.Node) -> Part:
        """Take an item of a loss: that of each token, or a sum."""
        pick = node_arg(node, 0)
        part: Part = lambda build, here: build.like(node, here[pick], node.args[1])  # noqa: E731
        is_each = node.args[1] == 0 and pick.args[3] == EACH
        return self._with(node, (), part) if is_each else self._total(node, 1, part)

    def _shaped(self, node: fx.Node) -> Part | None:
        source, tail = node_arg(node, 0), self.tail(node)
        expands = node.target is aten.expand.default
        if tail is None or (expands and source.meta["val"].dim() != node.meta["val"].dim()):
            return None
        op = aten.expand.default if expands else aten.view.default

        def part(build: PartBuilder, here: Mapping[fx.Node, fx.Node]) -> fx.Node:
            x, shape = here[source], [build.end - build.begin, *tail]
            return x if list(x.meta["val"].shape) == shape else build.like(node, x, shape, op=op)

        return self._with(node, tail, part)

    def _along(self, node: fx.Node) -> Part | None:
        """An op along the words, such as a softmax or a sum, or a sum over the tokens."""
        inputs, after = [*input_nodes(node)], node.meta["val"]
        tail, rank = self.tails[inputs[0]], inputs[0].meta["val"].dim()
        over = dims_of(node, rank)
        if not tail or not all(self.tails.get(x) for x in inputs):
            return None

        def along(dim: int) -> Part:
            at = place_of(node, "dim")
            dims = dim if isinstance(node.args[at], int) else [dim]

            def part(build: PartBuilder, here: Mapping[fx.Node, fx.Node]) -> fx.Node:
                args = fx.map_arg((*node.args[:at], dims, *node.args[at + 1 :]), here.__getitem__)
                return build.like(node, *args, **node.kwargs)

            return part

        if over == {rank - 1}:
            left = (*tail[:-1], after.shape[-1]) if after.dim() == rank else tail[:-1]
            return self._with(node, left, along(len(tail)))
        is_sum = node.target is aten.sum.dim_IntList
        return self._total(node, 1, along(0)) if is_sum and over == {*range(rank - len(tail))} else None


def refused(node: fx.Node, why: str) -> VocabularyError:
    """The error for an op that cannot be computed for some of the tokens."""
    remedy = "leave that use out"
    if node.target is aten.slice.Tensor:
        remedy = "shift the labels instead of the logits, F.pad(labels, (0, 1), value=-100)[:, 1:]"
    return VocabularyError(
        f"The head cannot be computed in parts of the tokens: {node.target} in {node.meta['origin']} {why}. "
        f"Compile without head_chunks, or {remedy}."
    )
