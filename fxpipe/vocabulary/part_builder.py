"""Makes the ops of a head for some of its tokens."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from fxpipe.ir.builder import Builder, node_arg
from fxpipe.ir.dims import dims_of, is_pointwise
from fxpipe.ir.storage import operands_first
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
        parts: dict[fx.Node, fx.Node] = {}
        for node in operands_first(x, parts, lambda n: _sources(n, tokens, behind)):
            sources, args = _sources(node, tokens, behind), node.args
            if not sources:
                parts[node] = self._taken(node, tokens, behind)
            elif is_elementwise(node):
                args, kwargs = fx.map_arg((args, dict(node.kwargs)), parts.__getitem__)
                parts[node] = self.like(node, *args, **kwargs)
            elif node.target is aten.slice.Tensor:
                parts[node] = self.like(node, parts[sources[0]], behind, *args[2:])
            else:
                shape = [self.end - self.begin, *node.meta["val"].shape[len(tokens) :]]
                parts[node] = self.like(node, parts[sources[0]], shape)
        return parts[x]

    def _taken(self, x: fx.Node, tokens: Shape, behind: int) -> fx.Node:
        before, tail = _split(x, behind)
        if not before:
            return x
        if all(n == 1 for n in before):
            return self.like(x, x, [1, *tail], op=aten.view.default) if len(before) > 1 else x
        if before != tokens:
            x = self.like(x, x, [*tokens, *tail], op=aten.expand.default)
        if len(tokens) > 1:
            x = self.like(x, x, [prod(tokens), *tail], op=aten.reshape.default)
        return self.rows(x, 0)


def _split(x: fx.Node, behind: int) -> tuple[Shape, Shape]:
    """The dimensions of an operand: of tokens, and others."""
    shape = tuple(x.meta["val"].shape)
    at = max(0, len(shape) - behind)
    return shape[:at], shape[at:]


def _sources(x: fx.Node, tokens: Shape, behind: int) -> list[fx.Node]:
    """The operands of which the part of an operand is made; none for one that is taken as it is."""
    before, tail = _split(x, behind)
    if before != tokens or all(n == 1 for n in before):
        return []
    rank = len(before) + len(tail)
    is_large = prod(tail) > 1 and is_elementwise(x)
    is_of_columns = x.target is aten.slice.Tensor and dims_of(x, rank) == {rank - 1}
    is_expanded = x.target is aten.expand.default and node_arg(x, 0).meta["val"].dim() == rank
    return x.all_input_nodes if is_large or is_of_columns or is_expanded else []


def is_elementwise(node: fx.Node) -> bool:
    return node.target in _LIKE_AN_OPERAND or is_pointwise(node)
