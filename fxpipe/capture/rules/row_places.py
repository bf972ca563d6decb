"""Finds where the rows of a microbatch lie in the values of a forward, and what does not take all alike.

    view(x, [14, 6])               of [2, 7, 6]: the rows are in the first dimension still, 7 entries each
    transpose(x, 0, 1)             in the second one
    mm(w, x)                       one after the other in the last dimension
    x[: len(x) // 2], x[-1]        takes some rows by their place: others in a microbatch than in a batch
    [f(row) for row in x]          takes each alike, where no op but a sum has two of them
    softmax(q @ k.T) @ v           makes each row of all, as attention does along the leading dimension
    mm(x.T, y)                     a sum over rows

Every second row, ``x[0::2]``, is every second one of the batch, too.  The dimension of the rows is not known
behind ops that are not listed here, nor of microbatches of one row, where all is its own, nor on lanes, which
take shares of the rows and exchange them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from fxpipe.ir.builder import node_arg
from fxpipe.ir.dims import COPIES, RESHAPES, TRANSPOSES, dims_of, is_pointwise, order_behind
from fxpipe.ir.graph import Kind
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.storage import argument, call_nodes

aten = torch.ops.aten

BY_PLACE = (
    "it takes some rows by their place in the microbatch; the leading dimension of each leaf is its rows"
)
RELATIVE = "it makes each row of several"


class Place(NamedTuple):
    """The rows of a microbatch in a dimension, which is ``outer`` × rows × ``inner`` entries long."""

    dim: int
    outer: int = 1
    inner: int = 1


#: Ops that give the same entries, in order, another shape.
_SHAPES = RESHAPES | {aten.squeeze, aten.unsqueeze}
_PARTS = {
    aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.unbind, aten.unsafe_split,
    aten.unsafe_split_with_sizes,
}  # fmt: skip
#: Ops along dimensions that they name, and those of them whose results have all entries of these.
_ALL = {aten._log_softmax, aten._safe_softmax, aten._softmax, aten.cumsum, aten.flip}
_ALONG = _ALL | {
    aten.amax, aten.amin, aten.argmax, aten.argmin, aten.gather, aten.linalg_vector_norm, aten.logsumexp,
    aten.max, aten.mean, aten.norm,
    aten.min, aten.prod, aten.sort, aten.std, aten.sum, aten.topk, aten.var,
}  # fmt: skip
#: Ops that put values side by side, and those that are linear in each row.
_SIDE_BY_SIDE = {
    aten.cat, aten.copy, aten.index_copy, aten.index_put, aten.masked_scatter, aten.scatter,
    aten.select_scatter, aten.slice_scatter, aten.stack,
}  # fmt: skip
_LINEAR = _SHAPES | COPIES | TRANSPOSES | {
    aten.add, aten.expand, aten.mean, aten.neg, aten.select, aten.slice, aten.sub, aten.sum,
}  # fmt: skip
#: Ops of rows in the leading dimension.
_OF_LEADING = {
    aten.avg_pool2d, aten.convolution, aten.max_pool2d_with_indices, aten.native_batch_norm,
    aten.native_dropout, aten.native_group_norm,
}  # fmt: skip
#: Products of matrices, with the place of the first among their operands.
_PRODUCTS = {aten.addmm: 1, aten.baddbmm: 1, aten.bmm: 0, aten.mm: 0}
_ATTENTION = {
    aten._scaled_dot_product_attention_math, aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
}  # fmt: skip


class RowPlaces:
    """``of``: where the rows are in each value of which it is known.  ``sums``: products of matrices that are
    sums over rows.  ``joins``: the ops that do not take all rows alike, with the reason."""

    def __init__(self, graph: fx.Graph) -> None:
        self.of: dict[fx.Node, tuple[Place, ...]] = {}
        self.sums: set[fx.Node] = set()
        self.joins: dict[fx.Node, str] = {}
        self._summed: dict[tuple[int, ...], tuple[Place, ...]] = {}  # by shape, of what becomes one number
        self._single: dict[fx.Node, frozenset[int]] = {}  # the places of the rows that a value is made of
        self._taken: dict[fx.Node, list[tuple[fx.Node, int]]] = {}  # of a value, what takes a row by itself
        leaves = [n for n in graph.find_nodes(op="placeholder") if n.meta["input"].kind is Kind.BATCH]
        lengths = {n: n.meta["val"].shape[0] for n in leaves if n.meta["val"].dim()}
        self.rows = min(lengths.values(), default=1)
        if self.rows < 2 or any("c10d" in getattr(n.target, "namespace", "") for n in call_nodes(graph)):
            return
        self.of = {n: (Place(0, 1, k // self.rows),) for n, k in lengths.items() if k % self.rows == 0}
        for node in graph.nodes:
            if node.op == "call_function" and not node.meta["origin"].backward:
                shape = _shape(node)
                places = [
                    p for p in self._places(node) if p.dim < len(shape) and shape[p.dim] == self._size(p)
                ]
                if places:
                    self.of[node] = tuple(dict.fromkeys(places))
                else:
                    self._follow(node)
        ops: dict[int, set[Any]] = {}
        for node, (row, *others) in self._single.items():
            if not others and getattr(node.target, "overloadpacket", None) not in _LINEAR:
                ops.setdefault(row, set()).add(node.target)
        for taken in self._taken.values():
            of_each = [ops.get(row) for row in {row for _, row in taken}]
            if len(of_each) < self.rows or any(each != of_each[0] for each in of_each):
                self.joins |= {node: BY_PLACE for node, _ in taken}

    def _follow(self, node: fx.Node) -> None:
        """Follow values that are made of rows taken one by one; tell where one is made of several."""
        packet = getattr(node.target, "overloadpacket", None)
        rows = frozenset[int]().union(*(self._single[x] for x in input_nodes(node) if x in self._single))
        if node in self._single or not rows or packet in _SIDE_BY_SIDE:
            return
        is_scaled = packet in (aten.div, aten.mul) and len(input_nodes(node)) == 1
        if len(rows) == 1 or packet in _LINEAR or is_scaled:
            self._single[node] = rows
        else:
            self.joins[node] = BY_PLACE

    def _size(self, place: Place) -> int:
        return place.outer * self.rows * place.inner

    def _places(self, node: fx.Node) -> Iterable[Place]:
        operands = [x for x in input_nodes(node) if x in self.of]
        packet = getattr(node.target, "overloadpacket", None)
        if packet is aten.expand and node_arg(node, 0).meta["val"].numel() == 1:  # a gradient of such a sum
            return self._summed.get(tuple(_shape(node)), ())
        if not operands:
            return ()
        if packet in (aten.mean, aten.sum) and node.meta["val"].numel() == 1:
            self._summed[tuple(_shape(operands[0]))] = self.of[operands[0]]
        if packet in _PRODUCTS:
            return self._product(node, _PRODUCTS[packet])
        if packet in _ATTENTION:
            return self._attention(node)
        if packet in (aten.cat, aten.stack):
            return self._joined(node, operands)
        if is_pointwise(node) or packet in COPIES or packet in (aten.copy, aten.expand):
            dims = len(_shape(node))  # they are aligned at the last one
            return (p._replace(dim=p.dim + dims - len(_shape(x))) for x in operands for p in self.of[x])
        if packet is not None and "_backward" in packet.__name__:
            return (p for x in operands if _shape(x) == _shape(node) for p in self.of[x])
        first = operands[0]
        places = self.of[first]
        if packet is None:  # one of several results, of which a part may have the rows more than once
            sizes = _shape(node)
            return (
                p._replace(outer=sizes[p.dim] // (self.rows * p.inner)) for p in places if p.dim < len(sizes)
            )
        if packet is aten.embedding:
            return places if first is node.args[1] else ()
        if first is not node.args[0]:
            return ()
        if packet in _SHAPES:
            return (again for p in places if (again := self._reshaped(node, first, p)) is not None)
        if packet in TRANSPOSES:
            return (p._replace(dim=order_behind(node).index(p.dim)) for p in places)
        if packet in _PARTS:
            return self._part(node, first)
        if packet in _ALONG:
            named = dims_of(node, len(_shape(first)))
            gone = named if named and len(_shape(node)) < len(_shape(first)) else set()
            return (
                p._replace(dim=p.dim - sum(d < p.dim for d in gone))
                for p in places
                if packet in _ALL or (named is not None and p.dim not in named)
            )
        if packet is aten.native_layer_norm:
            places = tuple(p for p in places if p.dim < len(_shape(first)) - len(node.args[1]))  # type: ignore
            if places != self.of[first]:
                self.joins[node] = RELATIVE
            return places
        if packet is aten.convolution and any(p.dim > 1 for p in places):
            self.joins[node] = RELATIVE
        return (p for p in places if p.dim == 0 and packet in _OF_LEADING)

    def _reshaped(self, node: fx.Node, x: fx.Node, place: Place) -> Place | None:
        """The dimension that has the rows now."""
        before, after = _shape(x), _shape(node)
        outer = prod(before[: place.dim]) * place.outer
        for dim, size in enumerate(after):
            left = prod(after[:dim])
            if left and left * size >= outer * self.rows:
                inner, rest = divmod(left * size, outer * self.rows)
                return None if rest or outer % left else Place(dim, outer // left, inner)
        return None

    def _part(self, node: fx.Node, x: fx.Node) -> Iterable[Place]:
        """Of an op that takes some of the entries along a dimension."""
        dim = next(iter(dims_of(node, len(_shape(x))) or {0}))
        packet = getattr(node.target, "overloadpacket", None)
        is_one = packet in (aten.select, aten.unbind)
        places = [p._replace(dim=p.dim - (is_one and p.dim > dim)) for p in self.of[x] if p.dim != dim]
        along = next((p for p in self.of[x] if p.dim == dim), None)
        if along is None:
            return places
        length, unit, step, starts = self._size(along), self.rows * along.inner, 1, [0]
        if packet is aten.slice:
            sizes = [_shape(node)[dim]]
            starts = [(argument(node, "start") or 0) % length]  # type: ignore[operator]
            step = argument(node, "step", 1)  # type: ignore[assignment]
        else:
            sizes = [1] if is_one else [part.shape[dim] for part in node.meta["val"]]
        is_whole = all(n % unit == 0 for n in (*starts, *sizes)) and step == 1
        is_each = step > 1 and along.outer == 1 and length % step == 0 and sizes[0] * step == length
        if is_whole:
            places.append(along._replace(outer=sizes[0] // unit))
        elif not is_each and x.meta["val"].is_floating_point():  # of integers, lengths and positions
            if along == Place(dim) and {*sizes} == {1}:
                self._take(node, x, starts[0] if packet is aten.slice else argument(node, "index", None))
            else:
                self.joins[node] = BY_PLACE
        return places

    def _take(self, node: fx.Node, x: fx.Node, index: object) -> None:
        """Note what takes one row, or each of them by itself, as a loop over the rows does."""
        items = {node: index % self.rows} if isinstance(index, int) else {}
        if not items:
            items = {user: user.args[1] for user in node.users if user.target is operator.getitem}  # type: ignore
        self._single |= {item: frozenset({row}) for item, row in items.items()}
        self._taken.setdefault(x, []).extend((node, row) for row in items.values())

    def _joined(self, node: fx.Node, operands: Sequence[fx.Node]) -> Iterable[Place]:
        """Of tensors behind each other."""
        alike = len({self.of[x] for x in operands}) == 1
        places = self.of[operands[0]] if alike else ()
        dim = next(iter(dims_of(node, len(_shape(operands[0]))) or {0}))
        if getattr(node.target, "overloadpacket", None) is aten.stack:
            return [p._replace(dim=p.dim + (p.dim >= dim)) for p in places]
        tensors: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
        has_all = all(x in self.of for x in tensors)
        times = {p: len(tensors) if p.dim == dim else 1 for p in places}
        return [p._replace(outer=p.outer * times[p]) for p in places if p.dim != dim or has_all]

    def _product(self, node: fx.Node, start: int) -> Iterable[Place]:
        """Of matrices: a sum over the last dimension of one and the last but one of the other."""
        a, b = node_arg(node, start), node_arg(node, start + 1)
        last = len(_shape(node)) - 1
        of_a, of_b = self.of.get(a, ()), self.of.get(b, ())
        places = [p for p in of_a if p.dim < last] + [p for p in of_b if p.dim != last - 1]
        if not places:
            self.sums.add(node)
        elif any(p.dim == last for p in of_a) or any(p.dim == last - 1 for p in of_b):
            self.joins[node] = RELATIVE
        return places

    def _attention(self, node: fx.Node) -> Iterable[Place]:
        query, key, value = (node_arg(node, i) for i in range(3))
        length = len(_shape(key)) - 2
        if any(p.dim == length for x in (key, value) for p in self.of.get(x, ())):
            self.joins[node] = RELATIVE
        return self.of.get(query, ())


def _shape(node: fx.Node) -> Sequence[int]:
    """The shape of a value, or of the first of several."""
    value: Any = node.meta["val"]
    if isinstance(value, list | tuple):
        value = next((x for x in value if isinstance(x, torch.Tensor)), None)
    return value.shape if isinstance(value, torch.Tensor) else ()
