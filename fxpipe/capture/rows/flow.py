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
from fxpipe.ir.storage import may_draw_numbers

aten = torch.ops.aten

_LARGE = 2**26  # elements of a value that is computed


class Flow:
    """``of``: what values are of the rows, so far.  ``told``: ops, with the reason.  ``rows``: how many a
    microbatch has.  ``on_lanes``: whether lanes exchange values.  ``constants``: by name.  ``changing``:
    inputs that are other ones in each microbatch without being of the batch.  ``taken``: of a value, the ops
    that take one row of it by its number, each with that.  ``single``: the numbers of the rows of which such
    values are made.  ``added``: those of them to which a sum over all rows was added.  ``split``: ops that
    make groups of rows, with the dimension of these.  ``is_unsure``: whether an op on a single row may do
    another thing with several."""

    def __init__(self, rows: int, on_lanes: bool, constants: Mapping[str, torch.Tensor]) -> None:
        self.of: dict[fx.Node, Rows] = {}
        self.told: dict[fx.Node, str] = {}
        self.rows, self.on_lanes, self.constants = rows, on_lanes, constants
        self.changing, self.is_unsure = set[fx.Node](), False
        self.taken: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
        self.single: dict[fx.Node, frozenset[int]] = {}
        self.added = set[fx.Node]()
        self.split: dict[fx.Node, int] = {}

    def has(self, x: object, form: Form) -> bool:
        return isinstance(x, fx.Node) and x in self.of and self.of[x].form is form

    def is_sum(self, x: object) -> bool:
        """Whether a value is a sum over rows of floats; of integers it is a count, which is not told."""
        return self.has(x, Form.SUMMED) and is_float(x)  # type: ignore[arg-type]

    def size(self, place: Place) -> int:
        return place.outer * (self.rows // place.group) * place.inner

    def tell(self, node: fx.Node, why: str, rows: Rows) -> Rows:
        """Tell of an op, unless of what led to its operand; and go on with what its result would be."""
        if not any(self.has(x, Form.SUMMED) and self.of[x].is_told for x in input_nodes(node)):
            self.told[node] = why
        return rows

    def lost(self, node: fx.Node, why: str = UNKNOWN) -> Rows:
        """Follow the rows no further than this op: it is told, but of integers and on lanes."""
        return LOST if self.on_lanes or not is_float(node) else self.tell(node, why, LOST)

    def kept(
        self,
        node: fx.Node,
        x: fx.Node,
        is_kept: Callable[[Place], bool],
        why: str = RELATIVE,
        *,
        pairs: bool = False,
    ) -> Rows:
        """Follow an op that keeps the shape of an operand, and mixes the entries along some dimensions.

        pairs: whether it takes entries of its other operands that lie in the same dimensions.
        """
        rows = self.of[x]
        others = {p for y in input_nodes(node) if y is not x for p in self.of[y].places}
        if pairs and rows.form is Form.SAME:
            rows, others = each(others), set()
        if rows.form is Form.SAME or (others and not (pairs and others <= {*rows.places})):
            return self.lost(node)
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

    def differs(self, x: fx.Node, place: Place) -> bool:
        """Whether a value that is the same for all rows has other numbers for each of those at a place, as
        weights by their order in the microbatch have."""
        todo, seen = [(x, place)], set[tuple[fx.Node, Place]]()
        while todo:
            x, place = todo.pop()
            shape, dim = shape_of(x), place.dim
            is_one = dim < 0 or shape[dim] == 0 or (shape[dim] == 1 and self.rows > 1)
            if is_one or (x, place) in seen:
                continue
            seen.add((x, place))
            packet, operands = packet_of(x), [*input_nodes(x)]
            tensors = operands if packet is not None else []  # not several results
            behind = [(y, d) for y in tensors for d in range(len(shape_of(y))) if through(x, y, d) == dim]
            if x.op == "placeholder":
                is_of_model = x.meta["input"].kind is not Kind.CONSTANT
                if x not in self.changing and not (shape[dim] == 1 and is_of_model):
                    return not self.is_single()
            elif is_pointwise(x) or packet in families.POINTWISE:
                todo += [(y, place.at(dim + len(shape_of(y)) - len(shape))) for y in operands]
            elif packet is aten.embedding and dim < len(shape_of(operands[1])):
                todo.append((operands[1], place))
            elif behind:
                todo += [(y, place.at(d)) for y, d in behind]
            elif packet in families.NO_NUMBERS or may_draw_numbers(x.target):
                continue
            elif shape[dim] == 1 or shape[dim] != self.size(place) or not self._is_alike(x, place):
                return not self.is_single()
        return False

    def _is_alike(self, x: fx.Node, place: Place) -> bool:
        """Whether a value has the same numbers for all rows at a place, with random parameters, where what
        each microbatch draws is the same everywhere."""
        draw = torch.Generator().manual_seed(0)

        def sample(x: fx.Node) -> torch.Tensor | None:
            value = value_of(x)
            if value is None or prod(value.shape) > _LARGE:
                return None
            if x in self.changing or x.op != "placeholder":
                return torch.full(value.shape, 0.5, dtype=value.dtype, device="cpu")
            if is_float(x):
                return torch.randn(value.shape, generator=draw, dtype=value.dtype, device="cpu")
            return torch.randint(2, value.shape, generator=draw, device="cpu").to(value.dtype)

        try:
            value = self.computed(x, sample)
        except (IndexError, RuntimeError):  # of an op that takes not all numbers
            return False
        if value is None:
            return False
        of_rows = value.unflatten(place.dim, (place.outer, self.rows // place.group, place.inner))
        return torch.equal(of_rows, of_rows.roll(1, place.dim + 1))

    def value_of_constants(self, node: fx.Node) -> torch.Tensor | None:
        """Compute a value on the CPU, if ops of torch make it of constants alone, and it is not large."""
        return self.computed(node, lambda x: None)

    def computed(
        self, node: fx.Node, unknown: Callable[[fx.Node], torch.Tensor | None]
    ) -> torch.Tensor | None:
        """Compute a value on the CPU.  unknown: what an input that is no constant has, and a random op."""
        values = dict[fx.Node, Any]()

        def of_input(x: fx.Node) -> Any:
            value = x.meta["val"]  # of which some ops take the shape alone
            return values[x] if x in values else torch.zeros(value.shape, dtype=value.dtype, device="cpu")

        before, todo = set[fx.Node](), [node]
        while todo:
            x = todo.pop()
            if x not in before and packet_of(x) not in families.NO_NUMBERS:
                todo += x.all_input_nodes
            before.add(x)
        for x in (n for n in node.graph.nodes if n in before):
            if x.op == "placeholder" or may_draw_numbers(x.target):
                known = self.constants.get(x.meta["input"].name) if x.op == "placeholder" else None
                values[x] = unknown(x) if known is None or known.is_meta else known.cpu()
                if values[x] is None:
                    return None
                if isinstance(x.meta["val"], list | tuple):
                    values[x] = [values[x]] * len(x.meta["val"])
            elif prod(shape_of(x)) > _LARGE or not _is_torchs(x):
                return None
            else:
                args, kwargs = fx.map_arg((x.args, dict(x.kwargs)), of_input)
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
