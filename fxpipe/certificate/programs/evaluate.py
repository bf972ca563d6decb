"""Evaluates a program: its records (``plan/program/records.py``) on terms in the place of tensors.

Nothing of the text runs as Python: what a record does is written here, and it does nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import GeneratorType, MappingProxyType
from typing import Any, ClassVar, NoReturn

import torch

from fxpipe.certificate.problems import Line, Rejected
from fxpipe.certificate.programs.calls import Checked
from fxpipe.certificate.programs.sections import Sections
from fxpipe.certificate.programs.values import (
    FOLLOWS,
    Announced,
    Container,
    Leaves,
    Once,
    Printed,
    Sum,
    Value,
    Within,
    written,
)
from fxpipe.certificate.terms.terms import canonical
from fxpipe.plan.program import records as r

MOST_ROUNDS = 1_000_000  # of loops, and calls of functions


class Unbound(NameError):
    """A variable without a value.  ``is_around``: whether the function around has it, or will."""

    def __init__(self, name: str, is_around: bool) -> None:
        super().__init__(f"the variable {name} has no value there", name=name)
        self.is_around = is_around


@dataclass(eq=False, repr=False, slots=True)
class Frame:
    """A function that runs, or the top level.  ``local``: the names that it assigns; ``around``: where it
    finds others.  ``line``: that runs."""

    name: str
    local: Collection[str]
    values: dict[str, Any]
    around: Frame | None
    line: int = 0

    def lookup(self, name: str) -> Any:
        frame: Frame | None = self
        while frame is not None:
            if name in frame.values:
                return frame.values[name]
            if name in frame.local and frame.around is not None:
                raise Unbound(name, frame is not self)
            frame = frame.around
        raise Unbound(name, False)


@dataclass(eq=False, repr=False)
class Stack:
    """The functions of a rank's program that run, ``step`` first.  After an error they are those it left."""

    rank: int
    frames: list[Frame] = field(default_factory=list)

    def __call__(self) -> Line:
        """The line that runs."""
        return Line(self.rank, self.frames[-1].line if self.frames else 0)

    def of_step(self) -> Line:
        """The line of ``step`` that runs, which may call another function."""
        return Line(self.rank, self.frames[0].line if self.frames else 0)

    def lines(self) -> list[Line]:
        return [Line(self.rank, frame.line) for frame in self.frames] or [Line(self.rank, 0)]


@dataclass(eq=False, repr=False)
class Op:
    """An OpOverload as a program calls it."""

    overload: Any
    sections: Sections
    is_stateless: ClassVar[bool] = True

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.sections.running:
            return self.run(*args, **named)
        return self.sections.call(self, [*args, *named.values()], tuple(named))

    def run(self, *args: Any, **named: Any) -> Any:
        return self.sections.calls.call(self.overload, args, named)

    @property
    def name(self) -> str:
        return str(self.overload)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Op) and other.overload is self.overload

    def __hash__(self) -> int:
        return hash(self.overload)


@dataclass(eq=False, repr=False)
class Section:
    """A function at the top level of a program: what it does, its arguments say."""

    function: r.Function
    evaluator: Evaluator
    is_stateless: ClassVar[bool] = True

    def __call__(self, *args: Any, **named: Any) -> Any:
        sections = self.evaluator.sections
        if sections.running:  # of another section
            return self.run(*args, **named)
        sections.number += 1
        result = sections.call(self, [*args, *named.values()], tuple(named))
        sections.held.runs(self.name, sections.own, self.evaluator.stack())
        return result

    def run(self, *args: Any, **named: Any) -> Any:
        return self.evaluator.run(self.function, args, named, self.evaluator.top)

    @property
    def name(self) -> str:
        return self.function.name


@dataclass(eq=False, repr=False)
class Inner:
    """A function of ``step``, which reads its variables."""

    function: r.Function
    evaluator: Evaluator
    around: Frame

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.evaluator.run(self.function, args, named, self.around)


class Evaluator:
    """One rank's program.  libraries: modules that register ops, which it may import."""

    def __init__(
        self, program: r.Program, stack: Stack, sections: Sections, libraries: Collection[str]
    ) -> None:
        self.program, self.stack, self.sections = program, stack, sections
        self.libraries = {*libraries, "torch", "math", "__future__"}
        self.top = Frame("", (), {}, None)
        self.rounds = 0
        calls = sections.calls

        def keyed(key: Any, position: Any, op: Any, *args: Any, **named: Any) -> Any:
            if not isinstance(op, Op) or type(position) is not int:
                raise TypeError("keyed takes a key, a position and an op")
            return calls.keyed(key, position, op, args, named)

        def expect(value: Any, *says: Any) -> None:
            calls.effects.checked.append(Checked(calls.read(value), canonical(list(says))))

        self.imported = {"keyed": keyed, "expect": expect, "within": _within}

    def step(self, rt: Any, batch: Any) -> Any:
        """Run the top level, and then ``step``."""
        self.stack.frames.append(self.top)
        self.block(self.program.body, self.top)
        self.stack.frames.pop()
        step = self.top.values.get("step")
        if not isinstance(step, Section):
            raise Rejected(Line(self.stack.rank, 0), "has no function step(rt, batch)")
        return self.run(step.function, (rt, batch), {}, self.top)

    def run(self, function: r.Function, args: Sequence[Any], named: Mapping[str, Any], around: Frame) -> Any:
        """A call.  Its frame stays on the stack where it fails."""
        self._count(1)
        frame = Frame(function.name, function.local, _bound(function, args, named), around, function.line)
        self.stack.frames.append(frame)
        result = self.block(function.body, frame)
        self.stack.frames.pop()
        frame.values.clear()  # its functions refer to it
        return None if result is None else result[0]

    def _count(self, rounds: int) -> None:
        self.rounds += rounds
        if self.rounds > MOST_ROUNDS:
            raise Rejected(self.stack(), f"has loops of {self.rounds} rounds, and {MOST_ROUNDS} are the most")

    # -- statements ---------------------------------------------------------------------------------------

    def block(self, body: Sequence[r.Statement], frame: Frame) -> tuple[Any] | None:
        """What it returns, in a tuple; None if it runs to its end."""
        for each in body:
            frame.line = each.line
            # A value that a line has made lives no longer than its variable: each line has a call of its own.
            if (result := _STATEMENTS[type(each)](self, each, frame)) is not None:
                return result
        return None

    def _import(self, node: r.Import, frame: Frame) -> None:
        if node.names:
            frame.values.update({name: self.imported.get(name) for name in node.names})
        elif node.module not in self.libraries:
            raise Rejected(self.stack(), f"imports {node.module}, which the certificate does not run")

    def _assign(self, node: r.Assign, frame: Frame) -> None:
        self.store(node.target, self.value(node.value, frame), frame)

    def store(self, target: r.Target, value: Any, frame: Frame) -> None:
        match target:
            case r.Name(id=name):
                if frame is self.top and name == "MESSAGES" and isinstance(value, dict):
                    value = MappingProxyType({key: Announced(key, each) for key, each in value.items()})
                frame.values[name] = value
            case r.Item(of=of, index=index):
                container, key = self.value(of, frame), self._key(index, frame)
                if not isinstance(container, list | dict | Container):
                    raise TypeError(f"computes setitem of {written(container)}: {FOLLOWS}")
                container[key] = value
            case r.Sequence(items=items):
                if not isinstance(value, list | tuple):
                    raise TypeError(f"takes {written(value)} apart, which is no list")
                for each, part in zip(items, value, strict=True):
                    self.store(each, part, frame)  # type: ignore[arg-type]

    def _do(self, node: r.Do, frame: Frame) -> None:
        self.value(node.value, frame)

    def _delete(self, node: r.Delete, frame: Frame) -> None:
        for each in node.names:
            if each.id not in frame.values:
                raise Unbound(each.id, False)
            del frame.values[each.id]

    def _for(self, node: r.For, frame: Frame) -> tuple[Any] | None:
        for each in self._rounds(node.iterable, frame):
            self.store(node.target, each, frame)
            if (result := self.block(node.body, frame)) is not None:
                return result
        return None

    def _rounds(self, iterable: r.Expression, frame: Frame) -> Iterable[Any]:
        values = self.value(iterable, frame)
        if not isinstance(values, range | list | tuple | GeneratorType):
            raise TypeError(f"computes iter of {written(values)}: {FOLLOWS}")
        return self._counted(values)

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for each in values:
            self._count(1)
            yield each

    def _return(self, node: r.Return, frame: Frame) -> tuple[Any]:
        return (None if node.value is None else self.value(node.value, frame),)

    def _skipped(self, node: r.Skipped, frame: Frame) -> None:
        for name in node.names:
            frame.lookup(name)

    def _function(self, node: r.Function, frame: Frame) -> None:
        is_top = frame is self.top
        frame.values[node.name] = Section(node, self) if is_top else Inner(node, self, frame)

    # -- expressions --------------------------------------------------------------------------------------

    def value(self, node: r.Expression | r.Spread, frame: Frame) -> Any:
        return _EXPRESSIONS[type(node)](self, node, frame)

    def _literal(self, node: r.Literal, frame: Frame) -> Any:
        return node.value

    def _name(self, node: r.Name, frame: Frame) -> Any:
        return frame.lookup(node.id)

    def _op(self, node: r.Op, frame: Frame) -> Op:
        found: Any = torch.ops
        for name in node.name.split("."):
            found = getattr(found, name)
        if not hasattr(found, "_schema"):
            overloads = ", ".join(found.overloads()) if hasattr(found, "overloads") else ""
            raise TypeError(f"a program says which overload of an op it calls, of {found}: {overloads}")
        return Op(found, self.sections)

    def _of_runtime(self, node: r.OfRuntime, frame: Frame) -> Any:
        return getattr(frame.lookup("rt"), node.name)

    def _item(self, node: r.Item, frame: Frame) -> Any:
        of = self.value(node.of, frame)
        if isinstance(node.index, r.Slice):
            begin, end = (self._bound(each, frame) for each in (node.index.begin, node.index.end))
            if isinstance(of, list | tuple):
                return of[begin:end]
            return _printed(f"a part of {written(of)}", of)
        key = self._key(node.index, frame)
        if isinstance(of, list | tuple | dict | MappingProxyType | Container | Within | Leaves):
            return of[key]
        return _printed(f"getitem({written(of)}, {key})", of)

    def _bound(self, node: r.Expression | None, frame: Frame) -> int | None:
        number = None if node is None else self.value(node, frame)
        if type(number) not in (int, type(None)):
            raise TypeError(f"a list has no item {written(number)}")
        return number

    def _key(self, node: r.Expression | r.Slice, frame: Frame) -> Any:
        key = self.value(node, frame)  # type: ignore[arg-type]
        if not _is_plain(key):
            raise TypeError(f"computes hash of {written(key)}: {FOLLOWS}")
        return key

    def _sequence(self, node: r.Sequence, frame: Frame) -> Any:
        items = list[Any]()
        for each in node.items:
            if isinstance(each, r.Spread):
                items += self._rounds(each.of, frame)
            else:
                items.append(self.value(each, frame))
        return items if node.is_list else tuple(items)

    def _comprehension(self, node: r.Comprehension, frame: Frame) -> list[Any]:
        inner = Frame(frame.name, (), {}, frame, frame.line)
        items = list[Any]()
        self._nested(node, 0, inner, items)
        return items

    def _nested(self, node: r.Comprehension, depth: int, frame: Frame, items: list[Any]) -> None:
        if depth == len(node.loops):
            items.append(self.value(node.value, frame))
            return
        target, iterable = node.loops[depth]
        for each in self._rounds(iterable, frame):
            self.store(target, each, frame)
            self._nested(node, depth + 1, frame, items)

    def _range(self, node: r.Range, frame: Frame) -> range:
        return range(*(self.value(each, frame) for each in node.arguments))

    def _dict(self, node: r.Dict, frame: Frame) -> dict[Any, Any]:
        pairs = zip(node.keys, node.values, strict=True)
        return {self._key(key, frame): self.value(value, frame) for key, value in pairs}

    def _text(self, node: r.Text, frame: Frame) -> Any:
        parts = [self.value(each, frame) for each in node.parts]
        if not all(type(part) in (str, int, float) for part in parts):
            return Printed("a text")
        return "".join(map(str, parts))

    def _arithmetic(self, node: r.Arithmetic, frame: Frame) -> Any:
        values = [self.value(each, frame) for each in (node.left, node.right) if each is not None]
        if all(type(value) in _NUMBERS for value in values) and node.operator != "|":
            return (_OPERATORS if len(values) == 2 else _SIGNS)[node.operator](*values)
        match values:
            case [Once() as one, Once() as other] if node.operator == "|":
                return one.joined(other)
        return _printed(f" {node.operator} ".join(map(written, values)), *values)

    def _call(self, node: r.Call, frame: Frame) -> Any:
        function = self.value(node.function, frame)
        # Of each op of each microbatch, so the values of arguments are looked up here.
        args = [_EXPRESSIONS[type(each)](self, each, frame) for each in node.arguments]
        named = {name: self.value(each, frame) for name, each in node.named}
        frame.line = node.line
        return function(*args, **named)

    def _method(self, node: r.Method, frame: Frame) -> Any:
        of = self.value(node.of, frame)
        args = [self.value(each, frame) for each in node.arguments]
        frame.line = node.line
        if type(of) is dict and node.name in ("pop", "clear") and all(map(_is_plain, args[:1])):
            return getattr(of, node.name)(*args)
        if type(of) is list and (node.name in ("append", "insert") or all(map(_is_plain, args))):
            return getattr(of, node.name)(*args)
        raise TypeError(f"reads .{node.name} of {written(of)}: {FOLLOWS}")

    def _shown(self, node: r.Shown, frame: Frame) -> Printed:
        for name in node.names:
            frame.lookup(name)
        return Printed(node.text)


def _bound(function: r.Function, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The variables with which a call begins.  Raises TypeError where Python would."""
    names = function.parameters
    values = dict(zip(names, args, strict=False))
    if len(args) > len(names) or values.keys() & named.keys() or {*names} != values.keys() | named.keys():
        raise TypeError(f"{function.name} takes {', '.join(names) or 'no arguments'}")
    return {**values, **named}


def _within(container: Any, module: Any) -> Within:
    if not isinstance(container, Container) or type(module) is not str:
        raise TypeError("within takes the tensors of a rank, and the name of a module")
    return Within(container, module)


def _is_plain(value: Any) -> bool:
    """Whether a value is a key, or the number of an item."""
    return type(value) in (int, str, bool) or (type(value) is tuple and all(map(_is_plain, value)))


def _printed(text: str, *values: Any) -> Printed:
    """What a program computes of tensors without an op, which it may print.  Raises TypeError for other
    values."""
    if not any(isinstance(value, Value | Printed | Sum) for value in values):
        raise TypeError(f"cannot compute {text}")
    return Printed(text)


_NUMBERS = (bool, int, float, complex)
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
_SIGNS: dict[str, Callable[[Any], Any]] = {"-": operator.neg}


def _outside(evaluator: Evaluator, node: r.Outside, frame: Frame) -> NoReturn:
    raise Rejected(evaluator.stack(), f"is outside of what is checked: {node.what}")


_STATEMENTS: dict[type[Any], Callable[[Evaluator, Any, Frame], tuple[Any] | None]] = {
    r.Assign: Evaluator._assign,
    r.Delete: Evaluator._delete,
    r.Do: Evaluator._do,
    r.For: Evaluator._for,
    r.Function: Evaluator._function,
    r.Import: Evaluator._import,
    r.Outside: _outside,
    r.Return: Evaluator._return,
    r.Skipped: Evaluator._skipped,
}
_EXPRESSIONS: dict[type[Any], Callable[[Evaluator, Any, Frame], Any]] = {
    r.Arithmetic: Evaluator._arithmetic,
    r.Call: Evaluator._call,
    r.Comprehension: Evaluator._comprehension,
    r.Dict: Evaluator._dict,
    r.Item: Evaluator._item,
    r.Literal: Evaluator._literal,
    r.Method: Evaluator._method,
    r.Name: Evaluator._name,
    r.OfRuntime: Evaluator._of_runtime,
    r.Op: Evaluator._op,
    r.Range: Evaluator._range,
    r.Sequence: Evaluator._sequence,
    r.Shown: Evaluator._shown,
    r.Text: Evaluator._text,
}
