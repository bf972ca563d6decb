"""Evaluates a program: what the grammar (``plan/program/records.py``) has, on terms in the place of tensors.

Nothing of the text runs as Python: what a node does is written here, and it does nothing else.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import GeneratorType, MappingProxyType
from typing import Any, ClassVar

import torch

from fxpipe.certificate.problems import Line, Rejected
from fxpipe.certificate.programs.calls import Checked
from fxpipe.certificate.programs.frames import Frame, Stack, Unbound
from fxpipe.certificate.programs.sections import Sections
from fxpipe.certificate.programs.values import (
    FOLLOWS,
    Announced,
    Container,
    Leaves,
    Once,
    Printed,
    Within,
    written,
)
from fxpipe.certificate.terms.terms import canonical
from fxpipe.plan.program import records as r

MOST_ROUNDS = 1_000_000  # of loops, and calls of functions


@dataclass(eq=False, repr=False)
class Op:
    """An OpOverload as a program calls it."""

    overload: object
    sections: Sections
    is_stateless: ClassVar[bool] = True

    def __call__(self, *args: object, **named: object) -> object:
        if self.sections.running:
            return self.run(*args, **named)
        return self.sections.call(self, [*args, *named.values()], tuple(named))

    def run(self, *args: object, **named: object) -> object:
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

    def __call__(self, *args: object, **named: object) -> object:
        sections = self.evaluator.sections
        if sections.running:  # of another section
            return self.run(*args, **named)
        sections.number += 1
        result = sections.call(self, [*args, *named.values()], tuple(named))
        sections.log.runs(self.name, sections.microbatch, self.evaluator.stack())
        return result

    def run(self, *args: object, **named: object) -> object:
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

    def __call__(self, *args: object, **named: object) -> object:
        return self.evaluator.run(self.function, args, named, self.around)


class Evaluator:
    """One rank's program.  libraries: modules that register ops, which it may import."""

    def __init__(
        self, program: r.Program, stack: Stack, sections: Sections, libraries: Collection[str]
    ) -> None:
        self.program, self.stack, self.sections = program, stack, sections
        self.libraries = {*libraries, "torch", "math", "__future__"}
        self.top = Frame("", (), {"range": range}, None)
        self.rounds = 0
        calls = sections.calls

        def keyed(key: object, position: object, op: object, *args: object, **named: object) -> object:
            if not isinstance(op, Op) or type(position) is not int or not sections.running:
                raise TypeError("keyed takes a key, a position and an op, in a function")
            return calls.keyed(key, position, op, args, named)

        def expect(value: object, *says: object) -> None:
            if not sections.running:
                raise TypeError("expect stands in a function, which runs for each microbatch")
            calls.effects.checked.append(Checked(calls.read(value), canonical(list(says))))

        # ``lanes`` and ``inductor``, which programs import too, are no values: the parser knows them.
        self.imported = {"keyed": keyed, "expect": expect, "within": _within}

    def step(self, rt: object, batch: object) -> object:
        """Run the top level, and then ``step``."""
        self.stack.frames.append(self.top)
        self.block(self.program.body, self.top)
        self.stack.frames.pop()
        step = self.top.values.get("step")
        if not isinstance(step, Section):
            raise Rejected(Line(self.stack.rank, 0), "has no function step(rt, batch)")
        result = self.run(step.function, (rt, batch), {}, self.top)
        self.top.values.clear()  # its functions refer to it, and to the program
        return result

    def run(
        self, function: r.Function, args: Sequence[object], named: Mapping[str, object], around: Frame
    ) -> object:
        """A call.  Its frame stays on the stack where it fails."""
        self._count()
        frame = Frame(function.name, function.local, _bound(function, args, named), around, function.lineno)
        self.stack.frames.append(frame)
        result = self.block(function.body, frame)
        self.stack.frames.pop()
        frame.values.clear()  # its functions refer to it
        return None if result is None else result[0]

    def _count(self) -> None:
        self.rounds += 1
        if self.rounds > MOST_ROUNDS:
            raise Rejected(self.stack(), f"has loops of {self.rounds} rounds, and {MOST_ROUNDS} are the most")

    # -- statements ---------------------------------------------------------------------------------------

    def block(self, body: Sequence[ast.stmt], frame: Frame) -> tuple[object] | None:
        """What it returns, in a tuple; None if it runs to its end."""
        for each in body:
            frame.line = each.lineno
            # A value that a line has made lives no longer than its variable: each line has a call of its own.
            if (result := self.perform(each, frame)) is not None:
                return result
        return None

    def perform(self, node: ast.stmt, frame: Frame) -> tuple[object] | None:
        match node:
            case ast.Assign(targets=[target], value=value):
                self.store(target, self.value(value, frame), frame)
            case ast.Expr(value=value):
                self.value(value, frame)
            case ast.Delete(targets=names):
                for each in names:
                    assert isinstance(each, ast.Name)
                    if each.id not in frame.values:
                        raise Unbound(each.id, False)
                    del frame.values[each.id]
            case ast.For(target=target, iter=iterable, body=body):
                for each in self._rounds(iterable, frame):
                    self.store(target, each, frame)
                    if (result := self.block(body, frame)) is not None:
                        return result
            case ast.Return(value=value):
                return (None if value is None else self.value(value, frame),)
            case r.Skipped(names=names):
                for name in names:
                    frame.lookup(name)
            case r.Function(name=name):
                is_top = frame is self.top
                frame.values[name] = Section(node, self) if is_top else Inner(node, self, frame)
            case ast.Import(names=[ast.alias(name=module)]):
                if module not in self.libraries:
                    raise Rejected(self.stack(), f"imports {module}, which the certificate does not run")
                frame.values[module.partition(".")[0]] = None
            case ast.ImportFrom(names=aliases):
                frame.values |= {each.name: self.imported.get(each.name) for each in aliases}
            case r.Outside(what=what):
                raise Rejected(self.stack(), f"is outside of what is checked: {what}")
        return None

    def store(self, target: ast.expr, value: object, frame: Frame) -> None:
        match target:
            case ast.Name(id=name):
                if frame is self.top and name == "MESSAGES" and isinstance(value, dict):
                    value = MappingProxyType({key: Announced(key, each) for key, each in value.items()})
                frame.values[name] = value
            case ast.Subscript(value=of, slice=index):
                container, key = self.value(of, frame), self._key(index, frame)
                if not isinstance(container, list | dict | Container):
                    raise TypeError(f"computes setitem of {written(container)}: {FOLLOWS}")
                container[key] = value
            case ast.Tuple(elts=items) | ast.List(elts=items):
                if not isinstance(value, list | tuple):
                    raise TypeError(f"takes {written(value)} apart, which is no list")
                for each, part in zip(items, value, strict=True):
                    self.store(each, part, frame)

    def _rounds(self, iterable: ast.expr, frame: Frame) -> Iterator[Any]:
        values = self.value(iterable, frame)
        if not isinstance(values, range | list | tuple | GeneratorType):
            raise TypeError(f"computes iter of {written(values)}: {FOLLOWS}")
        for each in values:
            self._count()
            yield each

    # -- expressions --------------------------------------------------------------------------------------

    def value(self, node: ast.expr, frame: Frame) -> Any:
        kind = type(node)
        if kind is ast.Name:  # most are, of all ops of all microbatches
            return frame.lookup(node.id)  # type: ignore[attr-defined]
        if kind is ast.Constant:
            return node.value  # type: ignore[attr-defined]
        match node:
            case ast.Call(func=ast.Attribute(value=of, attr=name), args=arguments):
                container, args = self.value(of, frame), [self.value(each, frame) for each in arguments]
                frame.line = node.lineno
                return _method(container, name)(*args)
            case ast.Call():
                return self._call(node, frame)
            case ast.Subscript(value=of, slice=index):
                return _item(self.value(of, frame), self._key(index, frame))
            case r.OfRuntime(name=name):
                return getattr(frame.lookup("rt"), name)
            case ast.List(elts=items):
                return [*self._items(items, frame)]
            case ast.Tuple(elts=items):
                return tuple(self._items(items, frame))
            case ast.JoinedStr(values=parts):
                texts = [self.value(each, frame) for each in parts]
                is_plain = all(type(text) in (str, int, float) for text in texts)
                return "".join(map(str, texts)) if is_plain else Printed("a text")
            case r.Op():
                return Op(overload_of(node), self.sections)
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return {self._key(key, frame): self.value(value, frame) for key, value in pairs if key}
            case ast.BinOp(left=left, op=sign, right=right):
                return _computed(r.SIGNS[type(sign)], self.value(left, frame), self.value(right, frame))
            case ast.UnaryOp(op=sign, operand=operand):
                return _computed(r.SIGNS[type(sign)], self.value(operand, frame))
            case ast.Slice(lower=begin, upper=end):
                return slice(*(each and self._key(each, frame) for each in (begin, end)))
            case ast.ListComp(generators=loops) | ast.GeneratorExp(generators=loops):
                inner = Frame(frame.name, (), {}, frame, frame.line)
                return [*self._comprehension(node.elt, loops, inner)]
            case r.Shown(text=text, names=names):
                for name in names:
                    frame.lookup(name)
                return Printed(text)
        raise TypeError(f"{type(node).__name__} has no value")

    def _call(self, node: ast.Call, frame: Frame) -> object:
        function = self.value(node.func, frame)
        args = [self.value(each, frame) for each in node.args]
        named = {str(each.arg): self.value(each.value, frame) for each in node.keywords}
        frame.line = node.lineno
        return function(*args, **named)

    def _key(self, node: ast.expr, frame: Frame) -> Any:
        key = self.value(node, frame)
        if not _is_plain(key) and type(key) is not slice:
            raise TypeError(f"computes hash of {written(key)}: {FOLLOWS}")
        return key

    def _items(self, items: Sequence[ast.expr], frame: Frame) -> Iterator[object]:
        for each in items:
            if isinstance(each, ast.Starred):
                yield from self._rounds(each.value, frame)
            else:
                yield self.value(each, frame)

    def _comprehension(
        self, value: ast.expr, loops: Sequence[ast.comprehension], frame: Frame
    ) -> Iterator[object]:
        if not loops:
            yield self.value(value, frame)
            return
        first, *inner = loops
        for each in self._rounds(first.iter, frame):
            self.store(first.target, each, frame)
            yield from self._comprehension(value, inner, frame)


def overload_of(op: r.Op) -> object:
    overload: object = torch.ops
    for name in op.name.split("."):
        overload = getattr(overload, name)
    if not hasattr(overload, "_schema"):
        overloads = ", ".join(overload.overloads()) if hasattr(overload, "overloads") else ""
        raise TypeError(f"a program says which overload of an op it calls, of {overload}: {overloads}")
    return overload


def _item(of: object, key: Any) -> Any:
    if isinstance(of, list | tuple | dict | MappingProxyType | Container | Within | Leaves):
        return of[key]
    raise TypeError(f"computes item {written(key)} of {written(of)}: {FOLLOWS}")


def _method(of: object, name: str) -> Callable[..., object]:
    if type(of) is list or (type(of) is dict and name in ("pop", "clear")):
        method: Callable[..., object] = getattr(of, name)
        return method
    raise TypeError(f"reads .{name} of {written(of)}: {FOLLOWS}")


def _computed(sign: str, *values: object) -> object:
    match values:
        case [Once() as one, Once() as other] if sign == "|":
            return one.joined(other)
        case [list() as items, int() as times] if sign == "*" and 0 <= times <= _MOST_READERS:
            return items * times  # the value of a message, once for each of its readers
    if sign != "|" and all(type(value) in (bool, int, float, complex) for value in values):
        return _SIGNS[sign, len(values)](*values)
    raise TypeError(f"computes {f' {sign} '.join(map(written, values))}: {FOLLOWS}")


def _bound(function: r.Function, args: Sequence[object], named: Mapping[str, object]) -> dict[str, object]:
    """The variables with which a call begins.  Raises TypeError where Python would."""
    names = function.parameters
    values = dict(zip(names, args, strict=False))
    if len(args) > len(names) or values.keys() & named.keys() or {*names} != values.keys() | named.keys():
        raise TypeError(f"{function.name} takes {', '.join(names) or 'no arguments'}")
    return {**values, **named}


def _within(container: object, module: object) -> Within:
    if not isinstance(container, Container) or type(module) is not str:
        raise TypeError("within takes the tensors of a rank, and the name of a module")
    return Within(container, module)


def _is_plain(value: object) -> bool:
    """Whether a value is a key, or the number of an item."""
    return type(value) in (int, str, bool) or (type(value) is tuple and all(map(_is_plain, value)))


#: How often a program may write one value in a list.
_MOST_READERS = 1 << 10
_SIGNS: dict[tuple[str, int], Callable[..., object]] = {
    ("-", 1): operator.neg,
    ("+", 2): operator.add,
    ("-", 2): operator.sub,
    ("*", 2): operator.mul,
    ("/", 2): operator.truediv,
    ("//", 2): operator.floordiv,
    ("%", 2): operator.mod,
}
