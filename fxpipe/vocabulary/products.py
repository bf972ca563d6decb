"""A rank's part of the gradient of the projected value: d_logits · table, over the rank's rows.

With one barrier the matrix product comes before it.  All that lies between the gradient of a log-softmax and
the product is linear in that gradient and scales a token's row or moves it about; so the product is made for
the exponentials, and for the labels' entries, and the result of the barrier, one factor a token, is applied
afterwards.  (2411.05288, section 4.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from fxpipe.errors import VocabularyError
from fxpipe.ir.builder import cast, node_arg
from fxpipe.ir.dims import is_pointwise
from fxpipe.schedule.ops import Phase
from fxpipe.vocabulary.axes import LINEAR, whole
from fxpipe.vocabulary.gradients import Gradients
from fxpipe.vocabulary.shard import Shard
from fxpipe.vocabulary.softmax import Softmax

aten = torch.ops.aten
_START = aten._log_softmax_backward_data.default


class Products(Protocol):
    def before(self, product: fx.Node) -> None:
        """The ops before the barrier."""
        ...

    def after(self, product: fx.Node) -> fx.Node:
        """The rank's part, behind the barrier."""
        ...


class TwoBarriers:
    """The product follows the barrier, and its sum over the ranks is the second one."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def before(self, product: fx.Node) -> None:
        pass

    def after(self, product: fx.Node) -> fx.Node:
        self.shard.phase = Phase.B
        logits, table = (self.shard.local(n) for n in product.all_input_nodes)
        return self.shard.at(Phase.B, product.meta["origin"]).call(aten.mm.default, logits, table)


@dataclass(frozen=True)
class _Unscaled:
    """A product for every part of the gradient; ``all`` only with label smoothing."""

    exponentials: fx.Node
    label_grad: fx.Node
    uniform_grad: fx.Node | None


class OneBarrier:
    def __init__(self, shard: Shard, softmax: Softmax, gradients: Gradients) -> None:
        self.shard, self.softmax, self.gradients = shard, softmax, gradients
        self.axes = shard.layers.axes
        self._way = self._find_way()
        self._unscaled: dict[fx.Node, _Unscaled] = {}

    def _find_way(self) -> set[fx.Node]:
        """Gradients of log-softmaxes, and the values made of them that have a vocabulary dimension."""
        way: set[fx.Node] = set()
        for node in self.axes:
            if node.target is _START or any(n in way for n in node.all_input_nodes):
                way.add(node)
        return way

    def before(self, product: fx.Node) -> None:
        shard, logits, rows = self.shard, node_arg(product, 0), self.shard.local(node_arg(product, 1))
        shard.phase = Phase.F  # of values that the gradient meets on its way: none is made of it
        exponentials, ones, labels, inside = {}, {}, {}, {}
        for start in self._starts(logits):
            parts = self.gradients.parts(start)
            if parts.label is None:
                raise whole(product)
            build, dtype = shard.at(Phase.F, start.meta["origin"]), start.meta["val"].dtype
            exponentials[start] = cast(build, self.softmax.exponentials[node_arg(start, 1)], dtype)
            if parts.uniform_grad is not None:
                ones[start] = build.call(aten.ones_like.default, exponentials[start])
            labels[start], outside = shard.nearest_rows(parts.label, build)
            # A factor: an infinite row makes the gradient of every projected value NaN without shards, too.
            inside[start] = cast(build, build.call(aten.bitwise_not.default, outside), dtype)

        def multiplied(seeds: dict[fx.Node, fx.Node]) -> fx.Node:
            left = self._carried(logits, shard.size, seeds, lambda value, place, met: value)
            return shard.at(Phase.F, product.meta["origin"]).call(aten.mm.default, left, rows)

        def at_label(value: fx.Node, place: int, met: fx.Node) -> fx.Node:
            index = self._moved(met, labels, Phase.F)
            shape, build = [*index.meta["val"].shape], shard.at(Phase.F, value.meta["origin"])
            shape[place] = shard.size
            if [*value.meta["val"].shape] != shape:
                value = build.call(aten.expand.default, value, shape)
            return build.call(aten.gather.default, value, len(shape) + place, index)

        slope = self._carried(logits, 1, inside, at_label)
        index = self._moved(logits, labels, Phase.F)
        build = shard.at(Phase.F, product.meta["origin"])
        label_rows = build.call(aten.embedding.default, rows, build.call(aten.reshape.default, index, [-1]))
        pick = build.call(aten.mul.Tensor, label_rows, slope)
        if ones and len(ones) < len(inside):
            raise whole(product)
        self._unscaled[product] = _Unscaled(
            multiplied(exponentials), pick, multiplied(ones) if ones else None
        )

    def after(self, product: fx.Node) -> fx.Node:
        unscaled, logits = self._unscaled[product], node_arg(product, 0)
        softmax, pick, everywhere = {}, {}, {}
        for start in self._starts(logits):
            parts = self.gradients.parts(start)
            softmax[start] = self.gradients.softmax_scale(start)
            assert parts.label_grad is not None, "asked for before the barrier"
            pick[start] = parts.label_grad
            if parts.uniform_grad is not None:
                everywhere[start] = parts.uniform_grad
        pairs = [(unscaled.exponentials, softmax), (unscaled.label_grad, pick)]
        if unscaled.uniform_grad is not None:
            pairs.append((unscaled.uniform_grad, everywhere))
        scaled = []
        for part, factors in pairs:
            factor = self._moved(logits, factors, Phase.B)
            build = self.shard.at(Phase.B, product.meta["origin"])
            # The factor first, as it leads to the statistics: they are made of the logits before the product.
            scaled.append(build.call(aten.mul.Tensor, factor, part))
        build = self.shard.at(Phase.B, product.meta["origin"])
        total = scaled[0]
        for other in scaled[1:]:
            total = build.call(aten.add.Tensor, total, other)
        return cast(build, total, product.meta["val"].dtype)

    def _before(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if n in self._way]

    def _starts(self, node: fx.Node) -> list[fx.Node]:
        """The gradients of log-softmaxes that a value is made from."""
        if node.target is _START:
            return [node]
        return [start for n in self._before(node) for start in self._starts(n)]

    def _carried(
        self,
        node: fx.Node,
        size: int,
        seeds: dict[fx.Node, fx.Node],
        operand: Callable[[fx.Node, int, fx.Node], fx.Node],
    ) -> fx.Node:
        """A value for other gradients of the log-softmaxes, with another size of the vocabulary.

        ``operand``: of the shard's part of a value of the forward, of its dimension of the vocabulary,
        counted from the last, and of the gradient that it meets.
        """
        if node in seeds:
            return seeds[node]
        before = self._before(node)
        if _scales(node) and not (len(before) == 1 and _is_linear(node, before[0])):
            raise _not_linear(node)
        ways = {n: self._carried(n, size, seeds, operand) for n in before}

        def part(n: fx.Node) -> fx.Node:
            place = self.axes[n] - n.meta["val"].dim()
            return ways[n] if n in ways else operand(self.shard.local(n), place, before[0])

        args, kwargs = self.shard.arguments(
            node, size, part, lambda mask, place: operand(mask, place, before[0])
        )
        return self.shard.at(Phase.F, node.meta["origin"]).copy(node, args, kwargs)

    def _moved(self, node: fx.Node, seeds: dict[fx.Node, fx.Node], phase: Phase) -> fx.Node:
        """One number a token, in the order of the tokens that a value has."""
        if node in seeds:
            return seeds[node]
        ways = {n: self._moved(n, seeds, phase) for n in self._before(node)}
        if _scales(node):
            (moved,) = ways.values()
            return moved
        args, kwargs = self.shard.arguments(node, 1, ways.__getitem__)
        return self.shard.at(phase, node.meta["origin"]).copy(node, args, kwargs)


def _scales(node: fx.Node) -> bool:
    """Does the op change each element by itself, rather than move it?"""
    return node.target in LINEAR or is_pointwise(node)


def _is_linear(node: fx.Node, before: fx.Node) -> bool:
    """Whether an elementwise op is linear in one of its arguments."""
    match node.target:
        case aten.where.self:
            return any(_is_zero(n) for n in node.args[1:]) and node.args[0] is not before
        case aten.masked_fill.Scalar:
            return node.args[0] is before and bool(node.args[2] == 0)
    is_known = node.target in LINEAR or node.target.overloadpacket.__name__.endswith("_backward")  # type: ignore
    return is_known and node.args[0] is before


def _is_zero(node: Any) -> bool:
    match node.target:
        case aten.scalar_tensor.default:
            return bool(node.args[0] == 0)
        case aten.full.default:
            return bool(node.args[1] == 0)
    return node.target in (aten.zeros.default, aten.zeros_like.default)


def _not_linear(node: fx.Node) -> VocabularyError:
    origin = node.meta["origin"]
    return VocabularyError(
        f"vocab_parallel with one barrier cannot scale the gradient of the logits behind {node.target} in "
        f"{origin.module} ({origin.source}). Ask for "
        'vocab_parallel="2-barrier".'
    )
