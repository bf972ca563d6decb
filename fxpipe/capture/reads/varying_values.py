"""The values of the running trace: which of them vary from step to step, and which others are equal.

Values that depend on no input that varies are compared as numbers, since models keep tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from fxpipe.capture.functional import declare_writes, memory_roots, overwritten
from fxpipe.capture.reads.example import Example
from fxpipe.ir import compat
from fxpipe.ir.graph import Input, Kind
from fxpipe.ir.storage import draws_numbers

aten = torch.ops.aten

#: Ops that read nothing but the shape and dtype of their first argument.
_OF_A_SHAPE = {
    getattr(aten, name).default
    for kind in ("empty", "zeros", "ones", "full")
    for name in (f"{kind}_like", f"new_{kind}")
} | {aten.new_empty_strided.default}
#: Ops that write all of their first argument, and do not read it.
OVERWRITES = {aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}

#: The ops that read two values, one in each run; None for a result.
Readers = tuple[fx.Node | None, fx.Node | None]

#: Number of elements of a constant that are compared at once.
FEW = 16


class Values:
    """The values of a trace, by whether they vary.  ``varying``: those that depend on the microbatch, trained
    parameters, buffers that the step changes, or random numbers, and those whose memory gets such values.
    """

    def __init__(self, inputs: Sequence[tuple[Input, torch.Tensor]], results: Iterable[str]):
        self._graph, self._constants = compat.traced_graph(), compat.traced_constants()
        self._example = Example(inputs)
        declare_writes(self._graph)
        self._roots = memory_roots(self._graph)
        self.varying: set[fx.Node] = set()
        self._ops: set[fx.Node] = set()  # those that vary
        self._names: dict[object, int] = {}  # of a computation -> its number
        self._numbers: dict[fx.Node, int] = {}
        # op, argument -> the argument's number then
        self._read: dict[tuple[fx.Node | None, fx.Node], int] = {}
        self._equal: dict[tuple[int, int], bool] = {}
        self._written = {self._roots[x] for n in self._graph.nodes for x in overwritten(n)}
        for node, (source, tensor) in zip(self._graph.find_nodes(op="placeholder"), inputs, strict=False):
            changes = node in self._written or f"the buffer {source.name!r}" in results
            if source.kind is Kind.BATCH or tensor.requires_grad or changes:
                self.varying.add(node)
        self._find_varying()

    def _find_varying(self) -> None:
        """Find ``varying``, and number what other ops compute: equal numbers, equal computations."""
        wet = set(self.varying)  # memory with varying contents
        contents: dict[fx.Node, int] = {}  # other memory that was written -> the number of its contents
        for node in self._graph.nodes:
            if node.op != "call_function":
                self._numbers[node] = self._name(self._key_of(node) if node.op == "get_attr" else node)
                continue
            reads = [] if node.target in _OF_A_SHAPE else self.reads(node)
            targets = {self._roots[x] for x in overwritten(node)}
            now = {x: self._name((self._numbers.get(x), contents.get(self._roots[x]))) for x in reads}
            if (
                draws_numbers(node)
                or any(x in self.varying or self._roots[x] in wet for x in reads)
                or not wet.isdisjoint(targets)
            ):
                wet |= targets
                self._ops.add(node)
                self.varying.add(node)
                self.varying.update(x for x in node.all_input_nodes if self._roots[x] in wet)
                self._read.update({(node, x): number for x, number in now.items()})
                continue
            named = {x: f"%{number}" for x, number in now.items()}
            arguments = fx.map_arg((node.args, node.kwargs), named.get)
            self._numbers[node] = self._name(repr((str(node.target), arguments)))
            contents.update({x: self._name((contents.get(x), self._numbers[node])) for x in targets})

    def _name(self, computation: object) -> int:
        return self._names.setdefault(computation, len(self._names))

    def _key_of(self, constant: fx.Node) -> object:
        """A key for a constant: its contents if they are few, as numbers in Python code become tensors."""
        value = getattr(self._constants, constant.target)  # type: ignore[arg-type]
        if isinstance(value, torch.Tensor) and value.numel() <= FEW and value.layout is torch.strided:
            with compat.no_modes(), compat.no_function_modes():
                return value.dtype, value.shape, repr(value.tolist()) if not value.is_meta else id(value)
        return id(value)

    def number(self, value: fx.Node) -> int | None:
        """Give equal computations that do not vary the same number; None to others."""
        return self._numbers.get(value)

    def root(self, value: fx.Node) -> fx.Node:
        return self._roots[value]

    def is_fixed(self, value: fx.Node) -> bool:
        """Whether a value is the same in all steps, and at all times of a step."""
        return value not in self.varying and self._roots[value] not in self._written

    @staticmethod
    def reads(op: fx.Node) -> list[fx.Node]:
        """The arguments whose values an op reads."""
        arguments = op.all_input_nodes
        return [x for x in arguments if x is not op.args[0]] if op.target in OVERWRITES else arguments

    def relevant(self, ops: Sequence[fx.Node], results: Iterable[fx.Node | None]) -> list[fx.Node]:
        """The varying ops of a run that lead to its results or write to buffers."""
        needed = {x for x in results if x is not None}
        memory = {self._roots[x] for x in needed} | {x for x in self.varying if x.op == "placeholder"}
        relevant = []
        for op in reversed(ops):
            if op in needed or any(self._roots[x] in memory for x in overwritten(op)):
                needed.update(op.all_input_nodes)
                memory.update(self._roots[x] for x in op.all_input_nodes)
                if op in self._ops:
                    relevant.append(op)
        return relevant[::-1]

    def equal(self, a: fx.Node, b: fx.Node, at: Readers) -> bool:
        """Whether two values that do not vary are equal, each as an op reads it."""
        places = (a, at[0]), (b, at[1])
        x, y = (self._read.get((op, n)) or self._name((self._numbers[n], None)) for n, op in places)
        if x != y and (x, y) not in self._equal:
            values = [self._example.value(n, self._constants, "", op)[0] for n, op in places]
            self._equal[x, y] = same_numbers(*values)
        return x == y or self._equal[x, y]


def same_numbers(a: object, b: object) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return type(a) is type(b)  # as two generators of random numbers, which no program may hold
    with compat.no_modes():
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
