"""What the rules for ops (``layouts``, ``products``, ``reductions``, ``indices``) know and say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import fx

from fxpipe.capture.rows import families
from fxpipe.capture.rows.forms import (
    LOST,
    RELATIVE,
    SUMMED,
    UNKNOWN,
    Form,
    Rows,
    each,
    is_float,
    packet_of,
    shape_of,
    value_of,
)
from fxpipe.capture.rows.place import Place
from fxpipe.ir.builder import node_arg
from fxpipe.ir.dims import is_pointwise, through
from fxpipe.ir.graph import Kind
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.storage import leading_to, may_draw_numbers

aten = torch.ops.aten

_LARGE = 2**26  # elements of a value that is computed


class Flow:
    """``of``: what values are of the rows, so far.  ``told``: ops, with the reason.  ``rows``: how many a
    microbatch has.  ``on_lanes``: whether lanes exchange values.  ``constants``: by name.  ``changing``:
    inputs that are other ones in each microbatch without being of the batch.  ``taken``: of a value, the ops
    that take one row of it by its number, each with that.  ``single``: the numbers of the rows of which such
    values are made.  ``is_unsure``: whether an op on a single row may do another thing with several."""

    def __init__(self, rows: int, on_lanes: bool, constants: Mapping[str, torch.Tensor]) -> None:
        self.of: dict[fx.Node, Rows] = {}
        self.told: dict[fx.Node, str] = {}
        self.rows, self.on_lanes, self.constants = rows, on_lanes, constants
        self.changing, self.is_unsure = set[fx.Node](), False
        self.taken: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
        self.single: dict[fx.Node, frozenset[int]] = {}

    def has(self, x: object, form: Form) -> bool:
        return isinstance(x, fx.Node) and x in self.of and self.of[x].form is form

    def is_sum(self, x: object) -> bool:
        """Whether a value is a sum over rows of floats; of integers it is a count, which is not told."""
        return self.has(x, Form.SUMMED) and is_float(x)  # type: ignore[arg-type]

    def size(self, place: Place) -> int:
        return place.outer * self.rows * place.inner

    def tell(self, node: fx.Node, why: str, rows: Rows) -> Rows:
        """Tell of an op, unless of what led to its operand; and go on with what its result would be."""
        if not any(self.has(x, Form.SUMMED) and self.of[x].is_told for x in input_nodes(node)):
            self.told[node] = why
        return rows

    def lost(self, node: fx.Node, why: str = UNKNOWN) -> Rows:
        """Follow the rows no further than this op: it is told, but of integers and on lanes."""
        return LOST if self.on_lanes or not is_float(node) else self.tell(node, why, LOST)

    def kept(self, node: fx.Node, x: fx.Node, is_kept: Callable[[Place], bool], why: str = RELATIVE) -> Rows:
        """Follow an op that keeps the shape of an operand, and mixes the entries along some dimensions."""
        rows = self.of[x]
        if rows.form is not Form.EACH:
            return LOST
        stay = [*filter(is_kept, rows.places)]
        if len(stay) < len(rows.places) and not self.on_lanes:
            return self.tell(node, why, each(rows.places))
        return each(stay)

    def moved(self, node: fx.Node, move: Callable[[Place], Place | None]) -> Rows:
        """Follow an op that has the entries of its operand in another shape."""
        rows = self.of[node_arg(node, 0)]
        if rows.form is not Form.EACH:
            return Rows(rows.form)
        places = [again for p in rows.places if (again := move(p)) is not None]
        return each(places) if places or self.is_single() else self.lost(node)

    def is_single(self) -> bool:
        """Whether there is one row alone, which an op passes; notes that with several it may not."""
        self.is_unsure |= self.rows == 1
        return self.rows == 1

    def total(self, operands: Iterable[fx.Node]) -> Rows:
        """Follow a number that adds up entries; of rows that were taken one by one it is their own."""
        return LOST if any(x in self.single for x in operands) else SUMMED

    def differs(self, x: fx.Node, dim: int) -> bool:
        """Whether a value that is the same for all rows has other numbers along a dimension, as weights by
        their order in the microbatch have."""
        todo, seen = [(x, dim)], set[tuple[fx.Node, int]]()
        while todo:
            x, dim = todo.pop()
            shape = shape_of(x)
            if dim < 0 or (shape[dim] == 1 and self.rows > 1) or (x, dim) in seen:
                continue
            seen.add((x, dim))
            packet = packet_of(x)
            if x.op == "placeholder" or packet in (aten.arange, aten.linspace):
                is_of_model = x.op == "placeholder" and x.meta["input"].kind is not Kind.CONSTANT
                if x not in self.changing and not (shape[dim] == 1 and is_of_model):
                    return not self.is_single()
                continue
            for operand in input_nodes(x):
                before = shape_of(operand)
                if is_pointwise(x) or packet in families.POINTWISE:
                    todo.append((operand, dim + len(before) - len(shape)))
                elif packet is aten.slice:  # other numbers, if those that it takes some of are others
                    todo.append((operand, dim))
                elif packet not in families.NO_NUMBERS:
                    todo += [(operand, d) for d in range(len(before)) if through(x, operand, d) == dim]
        return False

    def value_of_constants(self, node: fx.Node) -> torch.Tensor | None:
        """Compute a value on the CPU, if ops of torch make it of constants alone, and it is not large."""
        before, values = leading_to([node]), dict[fx.Node, Any]()
        for x in (n for n in node.graph.nodes if n in before):
            if x.op == "placeholder":
                known = self.constants.get(x.meta["input"].name)
                if known is None or known.is_meta:
                    return None
                values[x] = known.cpu()
            elif may_draw_numbers(x.target) or prod(shape_of(x)) > _LARGE or not _is_torchs(x):
                return None
            else:
                args, kwargs = fx.map_arg((x.args, dict(x.kwargs)), values.__getitem__)
                on_cpu = {"device": "cpu"} if "device" in kwargs else {}
                values[x] = x.target(*args, **{**kwargs, **on_cpu})
        return values[node]  # type: ignore[no-any-return]

    def counts_rows(self, index: fx.Node) -> bool:
        """Whether an index is made of ``arange(rows)``: it has the number of each row."""
        todo, seen = [index], set[fx.Node]()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            is_range = packet_of(node) is aten.arange
            if node.op == "placeholder" and node.meta["input"].kind is Kind.CONSTANT:
                value = self.constants.get(node.meta["input"].name)
                is_range = value is not None and value.dim() == 1 and value.tolist() == [*range(len(value))]
            if is_range and shape_of(node)[0] % self.rows == 0:
                return True
            if not is_float(node):
                todo += input_nodes(node)
        return False

    def aligned(self, operands: Iterable[fx.Node], dims: int) -> list[Place]:
        """The places of operands that are aligned at the last of so many dimensions."""
        return [p.at(p.dim + dims - len(shape_of(x))) for x in operands for p in self.of[x].places]


def _is_torchs(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "aten") == "aten"


def is_number(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and not value.dim()
