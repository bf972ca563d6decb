"""Makes the ops of a head for some of its tokens."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from fxpipe.ir.builder import Builder, node_arg
from fxpipe.ir.dims import dims_of, is_pointwise
from fxpipe.schedule.ops import Color

aten = torch.ops.aten
_LIKE_AN_OPERAND = {aten._to_copy.default, aten.ones_like.default, aten.zeros_like.default}

Shape = tuple[int, ...]


class PartBuilder(Builder):
    """Makes the ops of one part, of the tokens from ``begin`` to ``end``.

    color: of its ops, if they have one.  with_gradient: whether the part has all that is to be computed of
    its tokens, also gradients of parameters.
    """

    def __init__(
        self,
        graph: fx.Graph,
        number: int,
        begin: int,
        end: int,
        color: Color | None,
        with_gradient: bool,
    ) -> None:
        super().__init__(graph)
        self.number, self.begin, self.end, self.color = number, begin, end, color
        self._with_gradient = with_gradient
        self._rows: dict[tuple[fx.Node, int], fx.Node] = {}

    def like(self, node: fx.Node, *args: Any, op: Any = None, **kwargs: Any) -> fx.Node:
        """An op of a node's origin; by default the same op."""
        self.origin = node.meta["origin"]
        target: Any = op or node.target
        made = self.call(target, *args, **kwargs)
        if self._with_gradient:
            made.meta["chunk"] = self.number
        return made

    def rows(self, x: fx.Node, dim: int) -> fx.Node:
        """The part of an operand whose dimension ``dim`` is that of the tokens."""
        if (x, dim) not in self._rows:
            self._rows[x, dim] = self.like(x, x, dim, self.begin, self.end, op=aten.slice.Tensor)
        return self._rows[x, dim]

    def operand(self, x: fx.Node, tokens: Shape, behind: int) -> fx.Node:
        """The part of an operand that is broadcast to the dimensions of the tokens and ``behind`` others.

        One as large as the logits is made of its own operands' parts.
        """
        shape = tuple(x.meta["val"].shape)
        at = max(0, len(shape) - behind)
        before, tail = shape[:at], shape[at:]
        if not before:
            return x
        if all(n == 1 for n in before):
            return self.like(x, x, [1, *tail], op=aten.view.default) if at > 1 else x
        if before == tokens and prod(tail) > 1 and is_elementwise(x):
            arguments = x.args, dict(x.kwargs)
            args, kwargs = fx.map_arg(arguments, lambda y: self.operand(y, tokens, behind))
            return self.like(x, *args, **kwargs)
        if before == tokens and x.target is aten.slice.Tensor and dims_of(x, len(shape)) == {len(shape) - 1}:
            part = self.operand(node_arg(x, 0), tokens, behind)
            return self.like(x, part, behind, *x.args[2:])
        if before == tokens and x.target is aten.expand.default:
            source = node_arg(x, 0)
            if source.meta["val"].dim() == len(shape):
                part = self.operand(source, tokens, behind)
                return self.like(x, part, [self.end - self.begin, *tail])
        if before != tokens:
            x = self.like(x, x, [*tokens, *tail], op=aten.expand.default)
        if len(tokens) > 1:
            x = self.like(x, x, [prod(tokens), *tail], op=aten.reshape.default)
        return self.rows(x, 0)


def is_elementwise(node: fx.Node) -> bool:
    return node.target in _LIKE_AN_OPERAND or is_pointwise(node)
