"""The ops that a program calls, on terms: what they give, what they write to, what they add to gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fxpipe.certificate.problems import Line, Rejected
from fxpipe.certificate.programs.values import (
    FOLLOWS,
    ON_ITS_WAY,
    Memory,
    Offloaded,
    Pending,
    Printed,
    Sum,
    Value,
)
from fxpipe.certificate.terms.identities import overlaps, permuted, rows_added
from fxpipe.certificate.terms.layouts import Unknown, layout_of, results_of
from fxpipe.certificate.terms.schemas import Schema, arguments_of, draws, schema_of
from fxpipe.certificate.terms.terms import Layout, Named, Term, Terms, canonical, operands


@dataclass(frozen=True)
class Added:
    """A summand that an op adds to the accumulator of a gradient."""

    name: str
    term: Term
    line: Line


@dataclass(frozen=True)
class Checked:
    """An ``expect`` of a program: the value, and all that it says of it."""

    term: Term
    says: object


@dataclass(eq=False, repr=False)
class Effects:
    """What a section does beside its results, of its own microbatch.  ``read``: parameters that it needs."""

    added: list[Added] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)
    read: set[str] = field(default_factory=set)


class Note(Protocol):
    """Reports a problem.  of: terms, of which the first that the captured step does not have may be why."""

    def __call__(self, text: str, cause: str = "", *, of: Sequence[Term] = ()) -> None: ...


@dataclass(eq=False, repr=False)
class Calls:
    """``line``: of the program that runs, ``step_line``: of its ``step``.  ``note``: reports a problem there.
    ``shapes``: of accumulators.
    ``effects``: of the section that runs."""

    terms: Terms
    line: Callable[[], Line]
    step_line: Callable[[], Line]
    note: Note
    shapes: dict[str, tuple[int, ...]]
    effects: Effects = field(default_factory=Effects)
    count: int = 0

    def call(self, op: object, args: object, kwargs: object) -> Any:
        """Call an OpOverload on values; a Value, a tuple of them, or None."""
        self.count += 1
        schema = schema_of(op)
        arguments = schema.bind(args, kwargs)
        if schema.name == "aten._foreach_add" and schema.written:
            return self._each(arguments)
        if any(isinstance(value, Sum) for value in arguments.values()):
            return self._to_sum(schema, arguments)
        if draws(schema, arguments):
            self.note(f"draws random numbers without a key: {schema.name}")
        return self._result(schema, arguments, op_term(self.terms, schema, self._terms_of(arguments)))

    def keyed(self, key: object, position: int, op: Any, args: object, kwargs: object) -> object:
        """A random op with its key."""
        self.count += 1
        schema = schema_of(op.overload)
        arguments = schema.bind(args, kwargs)
        term = keyed_term(self.terms, self.read(key), position, schema, self._terms_of(arguments))
        return self._result(schema, arguments, term)

    def read(self, value: object) -> Any:
        """The term of a value that an op reads; of lists of them alike."""
        match value:
            case Value():
                if value.is_stale:
                    by = value.memory.written
                    self.note(f"reads {value.term}, whose memory {by} has overwritten", f"writes at {by}")
                return value.term
            case list() | tuple():
                return [self.read(each) for each in value]
            case Offloaded():
                raise Rejected(self.line(), f"reads {value.value.term}, which is offloaded")
            case Pending():
                raise Rejected(self.line(), "reads a message before it has waited for it")
            case Sum():
                raise Rejected(self.line(), f"reads the gradient of {value.name}, which is not complete")
            case Printed():
                raise Rejected(self.line(), f"uses {value.text} in an op: {FOLLOWS}")
        return value

    def _terms_of(self, arguments: dict[str, object]) -> Named:
        return {name: self.read(value) for name, value in arguments.items()}

    def _result(self, schema: Schema, arguments: dict[str, object], term: Term) -> object:
        memory = self._memory(schema, arguments, term)
        if schema.results == 1:
            return Value(term, 0, memory or Memory(root=term))
        # 2 may stand for a list, whose length no schema says.
        number = schema.results if schema.results > 2 else results_of(self.terms, term)
        if schema.results == 0 and not schema.written:
            raise Rejected(self.line(), f"calls {schema.name}, which gives nothing")
        asked = dict(enumerate(term["output_mask"] or ()))
        return tuple(
            # torch gives None for what a mask leaves out
            None if asked.get(k) == ("bool", False) else self._item(term, k, memory)
            for k in range(number)
        )

    def _item(self, term: Term, index: int, memory: Memory | None) -> Value:
        item = self.terms.item(term, index)
        return Value(item, 0, memory or Memory(root=item))

    def _memory(self, schema: Schema, arguments: dict[str, object], term: Term) -> Memory | None:
        """The memory of the argument that the op views or writes to; None for new memory.  term: the op's."""
        if len(schema.written) > 1:
            raise Rejected(
                self.line(), f"{schema.name} writes to several values, which the certificate does not know"
            )
        if schema.name == "lanes.end":
            self._end(arguments["x"])
            return None
        if schema.name.startswith("lanes.begin_"):
            return Memory(ON_ITS_WAY, root=term)
        if schema.written and schema.written[0] in arguments:
            target = arguments[schema.written[0]]
            read = [value for name, value in arguments.items() if name != schema.written[0]]
            self._check_operands(target, read, schema.is_elementwise)
            if schema.results == 1:
                self._check_size(target, term)
            return self._write(target)
        viewed = arguments.get(schema.viewed) if schema.viewed is not None else None
        return viewed.memory if isinstance(viewed, Value) else None

    def _check_operands(self, target: object, operands: Iterable[object], is_elementwise: bool) -> None:
        """An elementwise op may read what it writes to as it is, but not as a view of it, with elements
        elsewhere; others read elements that they have written."""
        for operand in operands:
            if isinstance(operand, (list, tuple)):
                self._check_operands(target, operand, is_elementwise)
            if not isinstance(operand, Value) or not isinstance(target, Value):
                continue
            is_same = operand.term is target.term and is_elementwise
            if operand.memory is target.memory and not is_same:
                self.note(f"writes to {target.term} and reads {operand.term}, in the same memory")

    def _check_size(self, target: object, term: Term) -> None:
        """Torch resizes an ``out=`` of another shape, in memory that stays as large, and converts what an op
        writes to the dtype that is there."""
        if isinstance(target, Value) and layout_of(self.terms, target.term) != layout_of(self.terms, term):
            self.note(f"writes {term} to {target.term}, which has another shape or dtype", of=[term])

    def _write(self, target: object) -> Memory:
        if not isinstance(target, Value):
            raise Rejected(self.line(), "writes to what is no tensor")
        memory = target.memory
        if memory.keeper:
            self.note(f"writes to {target.term}, which is {memory.keeper}")
        if overlaps(self.terms, target.term, memory.root):
            self.note(f"writes to {target.term}, several of whose elements are one in memory")
        # Values that have read it before are stale from here on.
        memory.version += 1
        memory.written = str(self.line())
        return memory

    def _end(self, begun: object) -> None:
        """End an exchange: only the memory that its begin has given is filled, once, and no copy of it."""
        if not isinstance(begun, Value) or begun.memory.keeper != ON_ITS_WAY:
            raise Rejected(self.line(), "ends an exchange of what is not on its way between lanes")
        begun.memory.version += 1
        begun.memory.written = str(self.line())

    # -- gradients ----------------------------------------------------------------------------------------

    def _to_sum(self, schema: Schema, arguments: dict[str, object]) -> object:
        """An op on an accumulator: a transposed view, or an addition."""
        total = next(value for value in arguments.values() if isinstance(value, Sum))
        if schema.name in ("aten.t", "aten.transpose"):
            return Sum(total.name, not total.transposed)
        sums = [value for value in arguments.values() if isinstance(value, Sum)]
        # ``read`` refuses these: an op may add to an accumulator, but not read it.
        if not schema.written or not isinstance(arguments.get(schema.written[0]), Sum):
            return self.read(total)
        if len({(value.name, value.transposed) for value in sums}) > 1:
            return self.read(total)
        arguments = {name: value for name, value in arguments.items() if not isinstance(value, Sum)}
        term = self._summand(schema, total, arguments)
        if total.transposed:
            term = permuted(self.terms, term, (1, 0))
        self.effects.added.append(Added(total.name, term, self.line()))
        return total

    def _summand(self, schema: Schema, total: Sum, arguments: dict[str, object]) -> Term:
        terms = self._terms_of(arguments)
        make = self.terms.make
        match schema.name:
            case "aten.add" if terms.keys() == {"other"} and isinstance(terms["other"], Term):
                return terms["other"]
            # Without ``beta`` and ``alpha``, which would scale the sum or the summand.
            case "aten.addmm" if terms.keys() <= {"mat1", "mat2", "out_dtype"} and schema.written:
                wide = {"out_dtype": canonical(terms["out_dtype"])} if "out_dtype" in terms else {}
                return make("aten.mm", {"self": terms["mat1"], "mat2": terms["mat2"], **wide})
            case "aten.index_add" if terms.keys() == {"dim", "index", "source"} and terms["dim"] == 0:
                return rows_added(self.terms, terms["index"], terms["source"], self.shapes[total.name][0])
        raise Rejected(
            self.line(),
            f"does {schema.name} to the gradient of {total.name}: ops add to it, and nothing else",
        )

    def _each(self, arguments: Named) -> None:
        """Add to each accumulator its summand, as ``_foreach_add_`` does."""
        if arguments.keys() != {"self", "other"} or len(arguments["self"]) != len(arguments["other"]):
            raise Rejected(self.line(), "adds lists of different lengths, or a multiple")
        for total, part in zip(arguments["self"], arguments["other"], strict=True):
            if not isinstance(total, Sum):
                raise Rejected(self.line(), "adds to a value that is no gradient")
            self._to_sum(_ADD, {"self": total, "other": part})


_ADD = schema_of(torch.ops.aten.add_.Tensor)


def op_term(terms: Terms, schema: Schema, arguments: Named) -> Term:
    """The term of an op on terms and plain arguments.  Raises Unknown where it cannot be."""

    def as_tensor(value: object, dtype: torch.dtype, is_alone: bool) -> Term:
        # Beside a tensor it promotes as a number does; alone it is a tensor of its own dtype.
        if not is_alone:
            return terms.number(value, dtype)
        term = terms.plain("aten.scalar_tensor", {"s": canonical(value), "dtype": canonical(dtype)})
        term.layout = term.layout or Layout((), dtype)
        return term

    try:
        return terms.make(schema.name, arguments_of(schema, arguments, as_tensor))
    except Unknown as error:
        error.of = error.of or tuple(operands(tuple(arguments.values())))
        raise


def keyed_term(terms: Terms, key: Term, position: int, schema: Schema, arguments: dict[str, object]) -> Term:
    """The term of a random op: of its key, its position and its arguments."""
    plain = op_term(terms, schema, arguments)
    parts = {"key": key, "position": position, "op": ("op", plain.op), "given": plain.arguments}
    term = terms.plain("keyed", parts)
    if term.layout is None and term.results is None:
        term.layout, term.results = plain.layout, plain.results
    return term
