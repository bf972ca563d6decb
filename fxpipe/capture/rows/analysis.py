"""What each value of a forward is of the rows of a microbatch.

    x * 2, x @ w, softmax(x, -1)      a part for each row, made of that row alone
    mean(x * x), mm(x.T, y)           a sum or mean over the rows
    arange(7), w.exp()                the same for all rows
    sqrt(mean(x * x))                 another function of a sum: told
    x - mean(x), softmax(q @ k.T)     a row made of several: told
    x[: len(x) // 2], x[-1]           some rows by their place, others in a microbatch than in a batch: told
    [f(row) for row in x]             each alike, where no op but a sum has two of them

A step takes the mean over microbatches.  Of a sum over the rows, each made by itself, that is what a forward
of the whole batch has, and of nothing else: so each op that makes it another value is told, with the reason,
and what follows is taken as if it were none.  Ops are known by families (``families.py``); one of torch that
is in none is told as well.

Integers that are made of several rows, and bools, are lengths, orders and places, as those of tokens sorted
by experts: what they choose is not followed, nor told.  Neither is, on lanes, what lanes exchange.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from fxpipe.capture.rows import families, indices, layouts, products, reductions
from fxpipe.capture.rows.flow import Flow, is_number
from fxpipe.capture.rows.forms import (
    BY_PLACE,
    LOST,
    SAME,
    STATISTIC,
    SUMMED,
    Form,
    Rows,
    each,
    packet_of,
    shape_of,
)
from fxpipe.capture.rows.place import Place
from fxpipe.capture.rows.taken import LINEAR, TakenRows
from fxpipe.ir.builder import node_arg
from fxpipe.ir.compat import OpOverload
from fxpipe.ir.dims import SUMS, TRANSPOSES, is_pointwise, through
from fxpipe.ir.graph import Kind
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.storage import call_nodes, graph_outputs, leading_to, may_draw_numbers

aten = torch.ops.aten

Rule = Callable[[Flow, fx.Node], Rows]
_OF_FAMILIES: list[tuple[Any, Rule]] = [
    (families.POINTWISE, reductions.pointwise),
    (families.SHAPES, layouts.reshaped),
    (TRANSPOSES, layouts.transposed),
    (families.PARTS, layouts.part),
    (families.JOINED, layouts.joined),
    (families.INSERTED, layouts.inserted),
    (families.REDUCTIONS, reductions.reduced),
    (families.ALONG, reductions.along),
    (families.LEADING, reductions.leading),
    (families.SPATIAL, reductions.spatial),
    (families.BATCH_NORMS, reductions.batch_norm),
    (families.LAST, reductions.norm),
    (families.MATRICES, reductions.of_matrices),
    (families.PRODUCTS, products.product),
    (families.ATTENTION, products.attention),
    (families.PLACED, indices.placed),
]
_RULES: dict[Any, Rule] = {packet: rule for family, rule in _OF_FAMILIES for packet in family} | {
    aten._cdist_forward: products.distances,
    aten._ctc_loss: reductions.alignments,
    aten._embedding_bag: indices.bags,
    aten.as_strided: layouts.strided,
    aten.bincount: reductions.counts,
    aten.constant_pad_nd: layouts.padded,
    aten.diag_embed: layouts.diagonals,
    aten.diagonal: layouts.diagonal,
    aten.embedding: indices.looked_up,
    aten.gather: indices.gathered,
    aten.histc: reductions.counts,
    aten.index: indices.indexed,
    aten.index_select: indices.indexed,
    aten.linalg_solve_triangular: reductions.solved,
    aten.nll_loss2d_forward: reductions.cross_entropy,
    aten.nll_loss_forward: reductions.cross_entropy,
    aten.repeat: layouts.repeated,
    aten.tril: reductions.triangle,
    aten.triu: reductions.triangle,
}
#: Ops, beside those with torch's own tag, by which integers that say an order still do.
_KEEPING = families.SHAPES | TRANSPOSES | families.PARTS | SUMS | families.POINTWISE
#: Ops that put values side by side.
_SIDE_BY_SIDE = families.JOINED | families.INSERTED | families.PLACED | {aten.copy, aten.masked_scatter}


class RowAnalysis(Flow):
    """The rows in the values of a captured step, at first of data alone; ``follow`` adds the others."""

    def __init__(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        leaves = [n for n in graph.find_nodes(op="placeholder") if n.meta["input"].kind is Kind.BATCH]
        lengths = {n: n.meta["val"].shape[0] for n in leaves if n.meta["val"].dim()}
        ops = call_nodes(graph)
        on_lanes = any("c10d" in getattr(n.target, "namespace", "") for n in ops)
        super().__init__(min(filter(None, lengths.values()), default=1), on_lanes, constants)
        self._ops = [n for n in ops if not n.meta["origin"].backward]
        changed = graph_outputs(graph).buffers
        for node in graph.find_nodes(op="placeholder"):
            kind, name = node.meta["input"].kind, node.meta["input"].name
            is_data = kind in (Kind.BATCH, Kind.CONSTANT) or (kind is Kind.BUFFER and name not in changed)
            rows = SAME
            if node in lengths:
                inner, rest = divmod(lengths[node], self.rows)
                rows = LOST if rest or not inner else each([Place(0, 1, inner)])
            self.of[node] = rows._replace(is_data=is_data)
            if kind is Kind.KEY or name in changed:
                self.changing.add(node)
        for node in self._ops:
            if self._is_data(node):
                self._follow(node)

    def follow(self, exact: Container[fx.Node] = ()) -> None:
        """Follow the other values as well.  exact: divisions that are made by a count of the whole batch."""
        for node in self._ops:
            if node not in self.of:
                if node in exact:
                    self.of[node] = self.of[node_arg(node, 0)]._replace(is_data=False)
                else:
                    self._follow(node)
        self._tell_taken()

    def _is_data(self, node: fx.Node) -> bool:
        operands = [self.of.get(x) for x in input_nodes(node)]
        return not may_draw_numbers(node.target) and all(x is not None and x.is_data for x in operands)

    def _follow(self, node: fx.Node) -> None:
        operands = [self.of[x] for x in input_nodes(node)]
        rows = self._rows(node, {x.form for x in operands})
        if rows.form is Form.EACH and not isinstance(node.meta["val"], list):  # a list is of parts
            shape = shape_of(node)
            places = tuple(p for p in rows.places if p.dim < len(shape) and shape[p.dim] == self.size(p))
            if places != rows.places:
                self.is_single()  # which broadcasts
            rows = rows._replace(places=places) if places else LOST
        if rows.form is Form.EACH and not is_pointwise(node) and self._has_weights(node, rows.places):
            self.tell(node, BY_PLACE, rows)
        plus = rows.plus or next((x.plus for x in operands if x.plus), None)
        is_plus_told = plus is not None and (rows.form is Form.LOST or not reductions.is_affine(self, node))
        if plus is not None and is_plus_told:
            self.told[plus], plus = STATISTIC, None
        keeps_order = is_pointwise(node) or packet_of(node) in _KEEPING
        is_order = reductions.is_integer(node) and (
            rows.is_order or (keeps_order and any(x.is_order for x in operands))
        )
        if rows.form is Form.LOST:
            rows = self._follow_taken(node)
        self.of[node] = rows._replace(
            is_data=self._is_data(node),
            is_whole=node not in self.told and not is_plus_told and all(x.is_whole for x in operands),
            is_told=node in self.told or any(x.form is Form.SUMMED and x.is_told for x in operands),
            is_order=is_order,
            plus=plus if rows.form is Form.EACH else None,
        )

    def _has_weights(self, node: fx.Node, places: Sequence[Place]) -> bool:
        """Whether an operand that is the same for all rows has other numbers for each of them."""
        same = (x for x in input_nodes(node) if self.of[x].form is Form.SAME)
        dims = [(x, dim, beside(node, x, dim)) for x in same for dim in range(len(shape_of(x)))]
        beside_rows = ((x, p.at(dim)) for x, dim, to in dims for p in places if p.dim == to)
        is_partial = packet_of(node) in families.ALIGNED
        return any(
            self.differs(x, p) if shape_of(x)[p.dim] == self.size(p) else is_partial and not self.is_single()
            for x, p in beside_rows
        )

    def _rows(self, node: fx.Node, forms: set[Form]) -> Rows:
        packet = packet_of(node)
        if node.target is operator.getitem:
            return layouts.item(self, node)
        if forms <= {Form.SAME} or packet in families.NO_NUMBERS:
            return SAME
        if not isinstance(node.target, OpOverload):
            return LOST
        if "c10d" in node.target.namespace:
            return Rows(*self.of[node_arg(node, 0)][:2]) if is_sum_of_lanes(node) else LOST
        if forms <= {Form.SAME, Form.SUMMED}:
            return reductions.of_sums(self, node)
        if is_pointwise(node):
            return reductions.pointwise(self, node)
        if packet in _RULES:
            return _RULES[packet](self, node)
        if forms <= {Form.SAME, Form.LOST}:
            return LOST
        if "_backward" in packet.__name__:
            return reductions.gradient(self, node)
        if node.target.namespace == "aten" or not (length := [*shape_of(node)[:1]]):
            return self.lost(node)
        # a user's, which has rows in the first dimension, as models do
        of_operands = {p for x in input_nodes(node) for p in self.of[x].places if p.dim == 0}
        places = [p for p in of_operands if length == [self.size(p)]]
        return each(places) if places else self.lost(node)

    # -- rows that are taken one by one

    def _follow_taken(self, node: fx.Node) -> Rows:
        """Follow values that are made of rows taken one by one, to their sum; tell of one that is made of
        several otherwise."""
        packet = packet_of(node)
        rows = frozenset[int]().union(*(self.single[x] for x in input_nodes(node) if x in self.single))
        if node in self.single or not rows or (packet in _SIDE_BY_SIDE and len(rows) > 1):
            return LOST
        by_number = packet in (aten.div, aten.mul) and not isinstance(node.args[1], fx.Node)
        is_linear = packet in LINEAR or (by_number and not node.kwargs)
        sums = [x for x in input_nodes(node) if self.is_sum(x) or x in self.added]
        if sums and (len(sums) > 1 or not is_linear):
            return self.tell(node, STATISTIC, LOST)
        if len(rows) == 1 or is_linear:
            self.single[node] = rows
            self.added.update([node] if sums else [])
            return SUMMED if len(rows) == self.rows and is_number(node) else LOST
        return self.tell(node, BY_PLACE, LOST)

    def _tell_taken(self) -> None:
        """Tell of what takes one row by its place, if the others do not get the same ops."""
        if not self.taken:
            return
        rows = TakenRows(self)
        uneven = leading_to([*rows.uneven(self._ops)])
        for taken in self.taken.values():
            of_each = [rows.of_rows.get(row) for row in {row for _, row in taken}]
            is_even = len(of_each) == self.rows and all(each == of_each[0] for each in of_each)
            self.told |= {node: BY_PLACE for node, _ in taken if not is_even or node in uneven}


def beside(node: fx.Node, x: fx.Node, dim: int) -> object:
    """The dimension of a result each of whose entries is made of that entry of ``dim`` of an operand; it may
    take all of another operand."""
    packet, after = packet_of(node), len(shape_of(node))
    from_last = dim + after - len(shape_of(x))
    if packet in families.PRODUCTS:
        a, b = node.args[families.PRODUCTS[packet] :][:2]
        summed = len(shape_of(x)) - 1 if x is a else max(len(shape_of(x)) - 2, 0) if x is b else None
        return None if dim == summed else dim if x is a else from_last
    if packet in families.ATTENTION:
        return from_last if from_last < after - 2 or x is node.args[0] else None
    if packet in families.PLACED | {aten.gather}:
        along = indices.of_op(node)
        is_index = x in along.values() and packet not in families.ALIGNED
        return None if is_index or dim in along else dim
    if packet in families.PAIRS:
        return dim if dim == 0 and packet is not aten._trilinear else None
    return through(node, x, dim)


def is_sum_of_lanes(node: fx.Node) -> bool:
    """Whether an op adds what lanes have, or waits for that."""
    op: OpOverload = node.target  # type: ignore[assignment]
    if getattr(op, "namespace", "") != "_c10d_functional":
        return False
    name = op.overloadpacket.__name__
    return name == "wait_tensor" or (name == "all_reduce" and node.args[1] in ("sum", "avg"))
