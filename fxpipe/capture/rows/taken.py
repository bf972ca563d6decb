"""What is made of rows that are taken one by one, as in a loop over them: the same of each, or told.

    f(x[0]) + f(x[1])              each alike
    f(x[0]) - f(x[1])              the second has another factor
    f(x[0]) * 1 + f(x[1]) * 2      likewise
    f(x[0]) + g(x[1])              another function

A value is a sum of terms, each with a factor.  A term is what ops that are not linear make of one row, known
by a number that has nothing of which row it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from fxpipe.capture.rows import families
from fxpipe.capture.rows.flow import Flow
from fxpipe.capture.rows.forms import Form, packet_of, shape_of
from fxpipe.ir.dims import COPIES, TRANSPOSES
from fxpipe.ir.nodes import input_nodes

aten = torch.ops.aten

#: Ops that are linear in each row.
LINEAR = families.SHAPES | COPIES | TRANSPOSES | {
    aten.add, aten.expand, aten.mean, aten.neg, aten.rsub, aten.select, aten.slice, aten.sub, aten.sum,
}  # fmt: skip
_SMALL = 16  # entries of a constant that is known by its numbers


class Term(NamedTuple):
    """``function``: its number.  ``row``: of which it is made; None of what is the same for all."""

    function: int
    row: int | None


Terms = Mapping[Term, float]


class TakenRows:
    """``of_rows``: by row, the functions that ops make of it which are not linear."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._bases = {node: x for x, taken in flow.taken.items() for node, _ in taken}
        self._terms, self._numbers = dict[fx.Node, Terms](), dict[Hashable, int]()
        self.of_rows: dict[int, set[int]] = {}

    def uneven(self, ops: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """Follow the ops of a forward, in order, and yield the sums of all rows, and the rows put side by
        side, that do not have the same terms of each."""
        flow = self._flow
        for node in ops:
            self._terms[node] = terms = self._of(node)
            parts = [terms] if flow.has(node, Form.SUMMED) and node in flow.single else []
            if packet_of(node) in families.JOINED and flow.has(node, Form.EACH):
                parts = [self._terms[x] for x in input_nodes(node) if x in flow.single]
            of_each = dict[int | None, set[tuple[int, float]]]()
            for term, factor in (item for part in parts for item in part.items()):
                of_each.setdefault(term.row, set()).add((term.function, factor))
            of_each.pop(None, None)
            if any(of_one != next(iter(of_each.values())) for of_one in of_each.values()):
                yield node

    def _of(self, node: fx.Node) -> Terms:
        flow, packet = self._flow, packet_of(node)
        rows = flow.single.get(node, frozenset())
        if node in self._bases:
            return {Term(self._number("row of", self._bases[node], shape_of(node)), *rows): 1.0}
        first, second, *_ = [*node.args, None, None]
        if not rows:
            if packet in families.PARTS | {None} and not flow.has(first, Form.SAME):
                # Integers of rows, as labels, are not followed.
                return {Term(self._number("part of", self._written(first), shape_of(node)), None): 1.0}
            return {Term(self._function(node), None): 1.0}
        alpha: Any = node.kwargs.get("alpha", 1)
        match packet:
            case aten.add | aten.sub:
                return self._sum(first, 1, second, -alpha if packet is aten.sub else alpha)
            case aten.rsub:
                return self._sum(first, -alpha, second, 1)
            case aten.neg:
                return self._sum(first, -1)
            case aten.mul | aten.div if not isinstance(second, fx.Node) and not node.kwargs:
                return self._sum(first, second if packet is aten.mul else 1 / second if second else 0)
            case _ if packet in LINEAR:
                rest, terms = self._written((node.args[1:], node.kwargs)), self._sum(first, 1)
                numbers = {term: self._number(node.target, term.function, rest) for term in terms}
                return {term._replace(function=numbers[term]): terms[term] for term in terms}
        (row,), function = rows, self._function(node)
        self.of_rows.setdefault(row, set()).add(function)
        return {Term(function, row): 1.0}

    def _function(self, node: fx.Node) -> int:
        return self._number(node.target, self._written((node.args, node.kwargs)))

    def _sum(self, *parts: Any) -> Terms:
        """The terms of operands, each with its factor."""
        terms = dict[Term, float]()
        for x, factor in zip(parts[::2], parts[1::2], strict=True):
            of_x = self._of_input(x) if isinstance(x, fx.Node) else {Term(self._number("number"), None): x}
            for term, own in of_x.items():
                terms[term] = terms.get(term, 0.0) + own * factor
        return terms

    def _of_input(self, x: fx.Node) -> Terms:
        if x not in self._terms:
            flow, known = self._flow, self._flow.constants.get(x.meta["input"].name)
            name: Hashable = "drawn" if x in flow.changing else x
            if known is not None and not known.is_meta and known.numel() <= _SMALL:
                name = str(known.dtype), str(known.tolist())
            self._terms[x] = {Term(self._number("input", name, shape_of(x)), None): 1.0}
        return self._terms[x]

    def _written(self, args: Any) -> str:
        """Operands, without the numbers of rows."""

        def written(x: fx.Node) -> str:
            terms = self._of_input(x).items()
            return str(sorted(str((term.function, term.row is None, factor)) for term, factor in terms))

        return str(fx.map_arg(args, written))

    def _number(self, *what: Hashable) -> int:
        return self._numbers.setdefault(what, len(self._numbers))
