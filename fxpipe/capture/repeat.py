"""Compares a forward with a second run of it in the same trace, on the Python state that the first run left.

before: the ops of the first step; the ops of the forward as the next step would run it
after:  an error if the second run reads a result of the first; a warning if its ops differ otherwise

A program runs the ops of the first step at every step.  Both runs read parameters, buffers and the microbatch
from the same placeholders.  Values that depend on none of them are compared as numbers, since models keep
tables; ops on which no result depends are left out, since models keep records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from fxpipe.capture.example import Example
from fxpipe.capture.functional import KeepsState, declare_writes, memory_roots, overwritten
from fxpipe.ir import compat
from fxpipe.ir.graph import Input, Kind, Origin
from fxpipe.ir.storage import draws_numbers

aten = torch.ops.aten

#: Ops that read nothing but the shape and dtype of their first argument.
_OF_A_SHAPE = {
    getattr(aten, name).default
    for kind in ("empty", "zeros", "ones", "full")
    for name in (f"{kind}_like", f"new_{kind}")
} | {aten.new_empty_strided.default}
#: Ops that write all of their first argument, and do not read it.
_OVERWRITES = {aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}

#: The ops that read two values, one in each run; None for a result.
Readers = tuple[fx.Node | None, fx.Node | None]

#: Number of elements of a constant that are compared at once.
FEW = 16


@dataclass(frozen=True, eq=False)
class Run:
    """One run: its ops in order, and its results by name: loss, outputs, new buffers, gradients."""

    ops: list[fx.Node]
    results: Mapping[str, fx.Node | None]


def difference(
    first: Run,
    second: Run,
    inputs: Sequence[tuple[Input, torch.Tensor]],
    kept: Mapping[fx.Node, str],
) -> str:
    """How the second run in the running trace differs from the first, as a sentence; empty if it does not.

    inputs: the kind of each placeholder of the graph, and its real tensor, in order.
    kept: nodes of the first run -> the name under which the model keeps its tensor.
    Raises KeepsState where the second run reads a result of the first.
    """
    values = _Values(inputs, first.results)
    ops = [values.relevant(run) for run in (first, second)]
    own = set(second.ops)
    for op in ops[1]:
        for x in values.reads(op):
            if x in values.varying and x.op == "call_function" and x not in own:
                raise _carried(x, op, kept)
    same: dict[fx.Node, fx.Node] = {}  # ops and memory of the second run -> those of the first

    def alike(a: Any, b: Any, at: Readers) -> bool:
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            if a in values.varying or b in values.varying:
                number = values.number(b)
                if b not in same and number is not None and number == values.number(a):  # of its empty memory
                    same.setdefault(values.root(b), values.root(a))
                    return same[values.root(b)] is values.root(a)
                return same.get(b, b) is a
            if values.equal(a, b, at):
                return True
            earlier = sources(b) - own - (sources(a) - {a})
            if earlier:
                raise _carried(next((x for x in earlier if x in kept), b), at[1] or b, kept)
            return False
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
            return len(a) == len(b) and all(alike(x, y, at) for x, y in zip(a, b, strict=True))
        return type(a) is type(b) and bool(a == b or (a != a and b != b))

    for a, b in zip_longest(*ops):
        if a is None or b is None or a.target is not b.target or a.meta.get("grad") != b.meta.get("grad"):
            return _differs(_shown(a), _shown(b))
        skipped = 1 if b.target in _OVERWRITES and b.args[0] not in values.reads(b) else 0
        if skipped and (b.args[0] in own or b.args[0].op == "placeholder"):  # type: ignore[union-attr]
            skipped = 0
        old, new = ((*n.args[skipped:], *sorted(n.kwargs.items())) for n in (a, b))
        if not alike(old, new, (a, b)):
            return _differs(_shown(a), _shown(b))
        same[b] = a
    for name in dict.fromkeys([*first.results, *second.results]):
        a, b = first.results.get(name), second.results.get(name)
        if (a is None) != (b is None):
            return _differs(*(f"{name} as it is" if x is None else f"another {name}" for x in (a, b)))
        if a is not None and b is not None and not alike(a, b, (None, None)):
            return _differs(f"{name} from {_shown(a)}", f"from {_shown(b)}")
    return ""


def _differs(now: str, then: str) -> str:
    return f"The forward runs other ops when it runs again: {then} instead of {now}"


def _shown(op: fx.Node | None) -> str:
    """An op with its numbers, and its place in the model."""
    if op is None:
        return "nothing"
    packet = getattr(op.target, "overloadpacket", op.target)
    arguments = ", ".join("…" if isinstance(x, fx.Node) else str(x) for x in op.args)
    return f"{getattr(packet, '__name__', op.name)}({arguments}) ({op.meta.get('origin', Origin())})"


def _carried(value: fx.Node, op: fx.Node, kept: Mapping[fx.Node, str]) -> KeepsState:
    source, place = (x.meta.get("origin", Origin()) for x in (value, op))
    kind = f"in {kept[value]}" if value in kept else f"of {source}"
    return KeepsState(
        f"The forward keeps a result {kind}, and reads it when it runs again, at {place}. A program carries "
        "from step to step the tensors that the model's modules hold when it is compiled: run the model on "
        "one batch before you compile it, or make it a buffer of the shape and dtype that it has later on "
        "(register_buffer)."
    )


class _Values:
    """The values of the running trace: which of them vary from step to step, and which others are equal.

    ``varying``: those that depend on the microbatch, trained parameters, buffers that the step changes, or
    random numbers, and those whose memory gets such values.
    """

    def __init__(self, inputs: Sequence[tuple[Input, torch.Tensor]], results: Iterable[str]):
        self._graph, self._constants = compat.traced_graph(), compat.traced_constants()
        self._example = Example(inputs)
        declare_writes(self._graph)
        self._roots = memory_roots(self._graph)
        self.varying: set[fx.Node] = set()
        self._ops: set[fx.Node] = set()  # those that vary
        self._names: dict[Any, int] = {}  # of a computation -> its number
        self._numbers: dict[fx.Node, int] = {}
        self._read: dict[
            tuple[fx.Node | None, fx.Node], int
        ] = {}  # op, argument -> the argument's number then
        self._equal: dict[tuple[int, int], bool] = {}
        written = {self._roots[x] for n in self._graph.nodes for x in overwritten(n)}
        for node, (given, tensor) in zip(self._graph.find_nodes(op="placeholder"), inputs, strict=False):
            changes = node in written or f"the buffer {given.name!r}" in results
            if given.kind is Kind.BATCH or tensor.requires_grad or changes:
                self.varying.add(node)
        self._find_varying()

    def _find_varying(self) -> None:
        """Find ``varying``, and number what other ops compute: equal numbers, equal computations."""
        wet = set(self.varying)  # memory with varying contents
        contents: dict[fx.Node, int] = {}  # other memory that was written -> the number of its contents
        for node in self._graph.nodes:
            if node.op != "call_function":
                self._numbers[node] = self._name(self._held(node) if node.op == "get_attr" else node)
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

    def _name(self, computation: Any) -> int:
        return self._names.setdefault(computation, len(self._names))

    def _held(self, constant: fx.Node) -> Any:
        """A key for a constant: its contents if they are few, as numbers in Python code become tensors."""
        held = getattr(self._constants, constant.target)  # type: ignore[arg-type]
        if isinstance(held, torch.Tensor) and held.numel() <= FEW and held.layout is torch.strided:
            with compat.no_modes():
                return held.dtype, held.shape, repr(held.tolist()) if not held.is_meta else id(held)
        return id(held)

    def number(self, value: fx.Node) -> int | None:
        """The same for the results of equal computations that do not vary; None for others."""
        return self._numbers.get(value)

    def root(self, value: fx.Node) -> fx.Node:
        return self._roots[value]

    @staticmethod
    def reads(op: fx.Node) -> list[fx.Node]:
        """The arguments whose values an op reads."""
        found = op.all_input_nodes
        return [x for x in found if x is not op.args[0]] if op.target in _OVERWRITES else found

    def relevant(self, run: Run) -> list[fx.Node]:
        """The varying ops of a run that lead to its results or write to buffers."""
        needed = {x for x in run.results.values() if x is not None}
        memory = {self._roots[x] for x in needed} | {x for x in self.varying if x.op == "placeholder"}
        found = []
        for op in reversed(run.ops):
            if op in needed or any(self._roots[x] in memory for x in overwritten(op)):
                needed.update(op.all_input_nodes)
                memory.update(self._roots[x] for x in op.all_input_nodes)
                if op in self._ops:
                    found.append(op)
        return found[::-1]

    def equal(self, a: fx.Node, b: fx.Node, at: Readers) -> bool:
        """Whether two values that do not vary are equal, each as an op reads it."""
        places = (a, at[0]), (b, at[1])
        x, y = (self._read.get((op, n)) or self._name((self._numbers[n], None)) for n, op in places)
        if x != y and (x, y) not in self._equal:
            found = [self._example.value(n, self._constants, "", op)[0] for n, op in places]
            self._equal[x, y] = _same_numbers(*found)
        return x == y or self._equal[x, y]


def sources(value: fx.Node) -> set[fx.Node]:
    """The ops that a value comes from."""
    found, todo = set[fx.Node](), [value]
    while todo:
        node = todo.pop()
        if node.op == "call_function" and node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    with compat.no_modes():
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
