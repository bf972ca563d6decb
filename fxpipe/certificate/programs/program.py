"""Runs the text of a program with ops that make terms in the place of torch's."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, ClassVar, NoReturn

import torch

from fxpipe.certificate.problems import Line, Rejected
from fxpipe.certificate.programs.calls import Checked
from fxpipe.certificate.programs.language import (
    Refused,
    Torch,
    builtins_of_programs,
    check_language,
    harmless,
)
from fxpipe.certificate.programs.plain import NotPlain, form_of
from fxpipe.certificate.programs.sections import Sections
from fxpipe.certificate.programs.texts import without_texts
from fxpipe.certificate.programs.values import Announced, Value, Within
from fxpipe.certificate.terms.terms import canonical


class Lines:
    """Finds the line of a program that runs, of any rank."""

    def __init__(self, ranks: int) -> None:
        self._ranks = {file_of(rank): rank for rank in range(ranks)}

    def __call__(self) -> Line:
        frame: Any = sys._getframe(1)
        while frame is not None:
            rank = self._ranks.get(frame.f_code.co_filename)
            if rank is not None:
                return Line(rank, frame.f_lineno)
            frame = frame.f_back
        return Line(0, 0)

    def of_step(self) -> Line:
        """The line of a program's ``step`` that runs, which may call another function."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            rank = self._ranks.get(frame.f_code.co_filename)
            if rank is not None and frame.f_code.co_name == "step":
                return Line(rank, frame.f_lineno)
            frame = frame.f_back
        return Line(0, 0)

    def of(self, error: BaseException, rank: int) -> Line:
        """The innermost line that an error passed."""
        return (self.passed(error, rank) or [Line(rank, 0)])[-1]

    def passed(self, error: BaseException, rank: int) -> list[Line]:
        """The lines that an error passed, of ``step`` and the functions that it calls, outermost first."""
        lines, trace = list[Line](), error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == file_of(rank):
                lines.append(Line(rank, trace.tb_lineno))
            trace = trace.tb_next
        return lines


def file_of(rank: int) -> str:
    return f"rank{rank}.py"


def parsed(source: str, line: Line, has_asserts: bool) -> CodeType:
    """Raises Rejected for a text that is no program.  has_asserts: whether it runs its asserts, which
    ``python -O`` leaves out."""
    try:
        tree = without_texts(ast.parse(source, file_of(line.rank)))
        check_language(tree, line.rank)
        level = 0 if has_asserts else 1
        return builtins.compile(tree, file_of(line.rank), "exec", dont_inherit=True, optimize=level)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        number = getattr(error, "lineno", None) or 0
        raise Rejected(Line(line.rank, number), f"is no Python program: {error}") from error


@dataclass(eq=False, repr=False)
class Op:
    """An OpOverload as a program calls it."""

    overload: Any
    sections: Sections
    buffer: Callable[[str], Value]
    is_stateless: ClassVar[bool] = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.sections.running:
            return self.sections.calls.call(self.overload, args, kwargs)
        given = [*args, *kwargs.values()]
        return self.sections.call(self._alone, given, tuple(kwargs), self.buffer)

    def _alone(self, *args: Any, **kwargs: Any) -> Any:
        return self.sections.calls.call(self.overload, args, kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Op) and other.overload is self.overload

    def __hash__(self) -> int:
        return hash(self.overload)


class _Ops:
    """``torch.ops`` and what is below it."""

    def __init__(self, found: Any, made: Callable[[Any], Op]) -> None:
        self._found, self._made = found, made

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._found, name)
        below = self._made(found) if hasattr(found, "_schema") else _Ops(found, self._made)
        setattr(self, name, below)
        return below

    def __call__(self, *_: Any, **__: Any) -> Any:
        overloads = ", ".join(self._found.overloads()) if hasattr(self._found, "overloads") else ""
        raise TypeError(f"a program says which overload of an op it calls, of {self._found}: {overloads}")


class _Lanes:
    """The functions of the ops between lanes."""

    def __init__(self, ops: _Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Op:
        found: Op = getattr(self._ops.lanes, name).default
        return found


def namespace(
    sections: Sections, buffer: Callable[[str], Value], libraries: Collection[str]
) -> dict[str, Any]:
    """The names that a program finds: its builtins, with imports of what it may import.  libraries: modules
    that register ops, which it may import and not use."""
    calls = sections.calls
    own = Torch(_Ops(torch.ops, lambda overload: Op(overload, sections, buffer)), calls.line)

    def keyed(key: Any, position: int, op: Op, *args: Any, **kwargs: Any) -> Any:
        return calls.keyed(key, position, op, args, kwargs)

    def expect(value: Any, *says: Any) -> None:
        calls.effects.checked.append(Checked(calls.read(value), canonical(list(says))))

    modules: dict[str, Any] = {"torch": own}
    for place in ("fxpipe.runtime.program", "fxpipe.runtime"):
        modules[f"{place}.random"] = SimpleNamespace(keyed=keyed)
        modules[f"{place}.checks"] = SimpleNamespace(expect=expect)
        modules[f"{place}.inductor"] = SimpleNamespace(inductor=lambda function: function)
        modules[f"{place}.within"] = SimpleNamespace(within=Within)

    modules["fxpipe.runtime.program"] = SimpleNamespace(lanes=_Lanes(own.ops))

    def imported(name: str, *_: Any) -> Any:
        if name in modules:
            return modules[name]
        if (found := harmless(name, calls.line)) is not None:
            return found
        if name in libraries:
            return Refused(name.partition(".")[0], calls.line)
        raise Rejected(calls.line(), f"imports {name}, which the certificate does not run")

    known = {**builtins_of_programs(calls.line), "__import__": imported}
    return {"__builtins__": known, "__name__": "fxpipe_program"}


def loaded(
    source: str,
    rank: int,
    sections: Sections,
    buffer: Callable[[str], Value],
    libraries: Collection[str],
    has_asserts: bool,
) -> Callable[[Any, Any], Any]:
    """Run the top level of a program; its ``step``.  Its other functions are sections.  libraries: see
    ``namespace``; has_asserts: see ``parsed``."""
    found = namespace(sections, buffer, libraries)
    exec(parsed(source, Line(rank, 0), has_asserts), found)
    if isinstance(found.get("MESSAGES"), dict):
        found["MESSAGES"] = {name: Announced(name, layout) for name, layout in found["MESSAGES"].items()}
    step = found.get("step")
    if not isinstance(step, FunctionType):
        raise Rejected(Line(rank, 0), "has no function step(rt, batch)")
    top = _Top(rank, sections, buffer, step)
    found |= {name: top.frozen(name, value) for name, value in found.items() if not name.startswith("__")}
    return step


@dataclass(eq=False, repr=False)
class _Top:
    """The values at the top level of a program, such that no call of a section leaves something there for the
    next one: here a section runs once for all calls with such inputs."""

    rank: int
    sections: Sections
    buffer: Callable[[str], Value]
    step: FunctionType
    wrapped: dict[FunctionType, Callable[..., Any]] = field(default_factory=dict)

    def frozen(self, name: str, value: Any) -> Any:
        match value:
            case Announced():
                return value
            case FunctionType() if value.__module__ == "fxpipe_program":
                return value if value is self.step else self._function(value)
            case list():
                return _List(self.frozen(name, each) for each in value)
            case tuple() if type(value) is tuple:
                return tuple(self.frozen(name, each) for each in value)
            case dict():
                items = ((self.frozen(name, key), self.frozen(name, each)) for key, each in value.items())
                return MappingProxyType(dict(items))
            case BuiltinFunctionType() if isinstance(value.__self__, ModuleType | None):
                return value
            case FunctionType() | type() | Op() | Torch() | Refused() | _Ops() | _Lanes() | SimpleNamespace():
                return value
        if not _is_constant(value):
            self._refuse(f"has {name}, a {type(value).__name__}, which can change from call to call and")
        return value

    def _function(self, function: FunctionType) -> Callable[..., Any]:
        if function not in self.wrapped:
            defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
            if not all(map(_is_constant, defaults)):
                self._refuse("has a default that can change from call to call, which", function)
            if function.__closure__:
                self._refuse("has variables of another function, which", function)
            self.wrapped[function] = self.sections.wrapped(function, self.buffer)
        return self.wrapped[function]

    def _refuse(self, what: str, function: FunctionType | None = None) -> NoReturn:
        line = 0 if function is None else function.__code__.co_firstlineno
        raise Rejected(Line(self.rank, line), f"{what} is not checked")


def _is_constant(value: Any) -> bool:
    try:
        form_of(value)
    except NotPlain:
        return isinstance(value, Op)
    return True


class _List(tuple[Any, ...]):
    """A list that nothing can change, beside lists."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a list at the top level of a program has no .{name}, which could change it")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | _List) and [*self] == [*other]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getitem__(self, at: Any) -> Any:
        return [*self][at]

    def __add__(self, other: Any) -> Any:
        return [*self, *other]

    def __radd__(self, other: Any) -> Any:
        return [*other, *self]

    def __mul__(self, times: Any) -> Any:
        return [*self] * times

    __rmul__ = __mul__
