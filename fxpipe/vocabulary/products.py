"""A rank's part of the gradient of the projected value: d_logits · table, over the rank's rows.

With one barrier the matrix product comes before it.  All that lies between the gradient of a log-softmax and
the product is linear in that gradient and scales a token's row or moves it about; so the product is made for
the exponentials, and for the labels' entries, and the result of the barrier, one factor a token, is applied
afterwards.  (2411.05288, section 4.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from fxpipe.errors import VocabularyError
from fxpipe.ir.builder import cast, node_arg
from fxpipe.ir.dims import is_pointwise
from fxpipe.ir.storage import operands_first
from fxpipe.schedule.ops import Phase
from fxpipe.vocabulary.axes import LINEAR, whole
from fxpipe.vocabulary.gradients import Gradients
from fxpipe.vocabulary.shard import Shard
from fxpipe.vocabulary.softmax import Softmax

aten = torch.ops.aten
_START = aten._log_softmax_backward_data.default

Operand = Callable[[fx.Node, int, fx.Node], fx.Node]
"""Makes an operand of the shard's part of a value of the forward, of its dimension of the vocabulary, counted
from the last, and of the gradient that it meets."""


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
    """The products for gradients of losses of which a token has one, one for each part: ``label_grad`` only
    of cross-entropies, ``uniform_grad`` only with label smoothing."""

    starts: tuple[fx.Node, ...]
    exponentials: fx.Node
    label_grad: fx.Node | None = None
    uniform_grad: fx.Node | None = None


class OneBarrier:
    """``starts``: the gradients of log-softmaxes, and of log-sum-exps, g · exp(logits - log-sum-exp), each
    with its loss."""

    def __init__(self, shard: Shard, softmax: Softmax, gradients: Gradients) -> None:
        self.shard, self.softmax, self.gradients = shard, softmax, gradients
        self.axes = shard.layers.axes
        self.starts = self._find_starts()
        self._way = self._find_way()
        self._unscaled: dict[fx.Node, list[_Unscaled]] = {}

    def _find_starts(self) -> dict[fx.Node, fx.Node]:
        starts = {node: node_arg(node, 1) for node in self.axes if node.target is _START}
        of_seq = {each.meta["origin"].seq: each for each in self.shard.layers.logsumexps}
        for node in self.axes:
            origin = node.meta["origin"] if node.op == "call_function" else None
            if node.target is aten.exp.default and origin and origin.backward and origin.seq in of_seq:
                starts |= {n: of_seq[origin.seq] for n in node.users if n.target is aten.mul.Tensor}
        return starts

    def _find_way(self) -> dict[fx.Node, list[fx.Node]]:
        """Gradients of log-softmaxes, and the values made of them that have a vocabulary dimension, each with
        the gradients that it is made of."""
        # In the graph's order, so that what a value is made of is there before it.
        way: dict[fx.Node, list[fx.Node]] = {}
        for node in self.axes:
            before = [start for n in node.all_input_nodes for start in way.get(n, ())]
            starts = [node] if node in self.starts else [*dict.fromkeys(before)]
            if starts:
                way[node] = starts
        return way

    def before(self, product: fx.Node) -> None:
        self.shard.phase = Phase.F  # of values that the gradient meets on its way: none is made of it
        logits = node_arg(product, 0)
        self._unscaled[product] = [self._product(product, starts) for starts in self._alone(logits)]

    def _alone(self, logits: fx.Node) -> list[tuple[fx.Node, ...]]:
        """The starts of a gradient, those apart that give a token several gradients, which are added."""
        starts = self._way[logits]
        kinds = [tuple(n for n in starts if (n.target is _START) == kind) for kind in (True, False)]
        return [starts for starts in kinds if starts]

    def _product(self, product: fx.Node, starts: tuple[fx.Node, ...]) -> _Unscaled:
        shard, logits, rows = self.shard, node_arg(product, 0), self.shard.local(node_arg(product, 1))

        def multiplied(seeds: dict[fx.Node, fx.Node]) -> fx.Node:
            left = self._carried(logits, shard.size, seeds, lambda value, place, met: value)
            return shard.at(Phase.F, product.meta["origin"]).call(aten.mm.default, left, rows)

        exponentials = {}
        for start in starts:
            build, dtype = shard.at(Phase.F, start.meta["origin"]), start.meta["val"].dtype
            exponentials[start] = cast(build, self.softmax.exponentials[self.starts[start]], dtype)
        of_softmax = multiplied(exponentials)
        if starts[0].target is not _START:
            return _Unscaled(starts, of_softmax)
        ones, labels, inside = {}, {}, {}
        for start in starts:
            parts = self.gradients.parts(start)
            if parts.label is None:
                raise whole(product)
            build = shard.at(Phase.F, start.meta["origin"])
            if parts.uniform_grad is not None:
                ones[start] = build.call(aten.ones_like.default, exponentials[start])
            labels[start], outside = shard.nearest_rows(parts.label, build)
            # A factor: an infinite row makes the gradient of every projected value NaN without shards, too.
            inside[start] = cast(
                build, build.call(aten.bitwise_not.default, outside), start.meta["val"].dtype
            )

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
        return _Unscaled(starts, of_softmax, pick, multiplied(ones) if ones else None)

    def after(self, product: fx.Node) -> fx.Node:
        logits, scaled = node_arg(product, 0), list[fx.Node]()
        for unscaled in self._unscaled[product]:
            pairs = [(unscaled.exponentials, {start: self._scale(start) for start in unscaled.starts})]
            parts = {start: self.gradients.parts(start) for start in unscaled.starts if unscaled.label_grad}
            labels = {start: each.label_grad for start, each in parts.items() if each.label_grad is not None}
            uniform = {k: each.uniform_grad for k, each in parts.items() if each.uniform_grad is not None}
            if unscaled.label_grad is not None:
                pairs.append((unscaled.label_grad, labels))
            if unscaled.uniform_grad is not None:
                pairs.append((unscaled.uniform_grad, uniform))
            for part, factors in pairs:
                factor = self._moved(logits, factors, Phase.B)
                build = self.shard.at(Phase.B, product.meta["origin"])
                # The factor first, as it leads to the statistics: they are made of the logits before the
                # product.
                scaled.append(build.call(aten.mul.Tensor, factor, part))
        build = self.shard.at(Phase.B, product.meta["origin"])
        total = scaled[0]
        for other in scaled[1:]:
            total = build.call(aten.add.Tensor, total, other)
        return cast(build, total, product.meta["val"].dtype)

    def _scale(self, start: fx.Node) -> fx.Node:
        """The factor of a token's exponentials: their product is the gradient, but for that of labels and of
        smoothing."""
        if start.target is _START:
            return self.gradients.softmax_scale(start)
        loss, softmax = self.starts[start], self.softmax
        above = next(n for n in start.all_input_nodes if n not in self.axes)
        above = softmax.local_copy(above)
        build = self.shard.at(Phase.B, start.meta["origin"])
        above = cast(build, above, softmax.maxima[loss].meta["val"].dtype)
        below = build.call(aten.sub.Tensor, softmax.maxima[loss], softmax.logsums[loss])
        return build.call(aten.mul.Tensor, build.call(aten.exp.default, below), above)

    def _before(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if n in self._way]

    def _towards(self, node: fx.Node, seeds: Mapping[fx.Node, object]) -> list[fx.Node]:
        return [n for n in self._before(node) if not seeds.keys().isdisjoint(self._way[n])]

    def _carried(self, node: fx.Node, size: int, seeds: dict[fx.Node, fx.Node], operand: Operand) -> fx.Node:
        """A value for other gradients of the log-softmaxes, with another size of the vocabulary."""
        made = {**seeds}
        for each in operands_first(node, made, lambda n: self._towards(n, seeds)):
            ways = {n: made[n] for n in self._towards(each, seeds)}
            made[each] = self._on_way(each, size, ways, operand)
        return made[node]

    def _on_way(self, node: fx.Node, size: int, ways: dict[fx.Node, fx.Node], operand: Operand) -> fx.Node:
        before = [*ways]
        # Where all that is added is on the way, the other summand is made of other starts.
        is_sum = node.target is aten.add.Tensor and not node.kwargs
        if is_sum and len(before) == 1 and len(self._before(node)) == len(node.args):
            return ways[before[0]]
        if _scales(node) and not (len(before) == 1 and _is_linear(node, before[0])):
            raise _not_linear(node)

        def part(n: fx.Node) -> fx.Node:
            place = self.axes[n] - n.meta["val"].dim()
            return ways[n] if n in ways else operand(self.shard.local(n), place, before[0])

        args, kwargs = self.shard.arguments(
            node, size, part, lambda mask, place: operand(mask, place, before[0])
        )
        return self.shard.at(Phase.F, node.meta["origin"]).copy(node, args, kwargs)

    def _moved(self, node: fx.Node, seeds: dict[fx.Node, fx.Node], phase: Phase) -> fx.Node:
        """One number a token, in the order of the tokens that a value has."""
        made = {**seeds}
        for each in operands_first(node, made, lambda n: self._towards(n, seeds)):
            if _scales(each):
                (made[each],) = (made[n] for n in self._towards(each, seeds))
            else:
                args, kwargs = self.shard.arguments(each, 1, made.__getitem__)
                made[each] = self.shard.at(phase, each.meta["origin"]).copy(each, args, kwargs)
        return made[node]


def _scales(node: fx.Node) -> bool:
    """Whether the op changes each element by itself, rather than moves it."""
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
