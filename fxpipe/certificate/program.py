"""Runs the text of a program with ops that make terms in the place of torch's."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch

from fxpipe.certificate.calls import Checked
from fxpipe.certificate.problems import Line, Rejected
from fxpipe.certificate.sections import Sections
from fxpipe.certificate.terms import canonical
from fxpipe.certificate.values import Announced, Value, Within

#: Modules that a program may import beside torch and fxpipe's own.
_HARMLESS = (
    "__future__",
    "collections",
    "contextlib",
    "functools",
    "itertools",
    "math",
    "operator",
    "typing",
)
#: What a program has no use for, and what would let it do more than compute.
_WITHOUT = ("open", "exec", "eval", "compile", "input", "breakpoint", "__import__", "exit", "quit")


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

    def of(self, error: BaseException, rank: int) -> Line:
        """The innermost line that an error passed."""
        number, trace = 0, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == file_of(rank):
                number = trace.tb_lineno
            trace = trace.tb_next
        return Line(rank, number)


def file_of(rank: int) -> str:
    return f"rank{rank}.py"


def parsed(source: str, line: Line) -> CodeType:
    """Raises Rejected for a text that is no program."""
    try:
        return builtins.compile(source, file_of(line.rank), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        number = getattr(error, "lineno", None) or 0
        raise Rejected(Line(line.rank, number), f"is no Python program: {error}") from error


@dataclass(eq=False, repr=False)
class Op:
    """An OpOverload as a program calls it."""

    overload: Any
    sections: Sections
    buffer: Callable[[str], Value]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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


class _Torch:
    """``torch`` in a program: its ops make terms, and its dtypes and the like are torch's."""

    def __init__(self, ops: _Ops) -> None:
        self.ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Lanes:
    """The functions of the ops between lanes."""

    def __init__(self, ops: _Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Op:
        found: Op = getattr(self._ops.lanes, name).default
        return found


def namespace(sections: Sections, buffer: Callable[[str], Value]) -> dict[str, Any]:
    """The names that a program finds: its builtins, with imports of what it may import."""
    calls = sections.calls
    own = _Torch(_Ops(torch.ops, lambda overload: Op(overload, sections, buffer)))

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

    def imported(name: str, *rest: Any) -> Any:
        if name in modules:
            return modules[name]
        if name.partition(".")[0] in _HARMLESS:
            return builtins.__import__(name, *rest)
        raise Rejected(calls.line(), f"imports {name}, which the certificate does not run")

    names = {name: getattr(builtins, name) for name in dir(builtins) if name not in _WITHOUT}
    return {"__builtins__": {**names, "__import__": imported}, "__name__": "fxpipe_program"}


def loaded(
    source: str, rank: int, sections: Sections, buffer: Callable[[str], Value]
) -> Callable[[Any, Any], Any]:
    """Run the top level of a program; its ``step``.  Its other functions are sections."""
    found = namespace(sections, buffer)
    exec(parsed(source, Line(rank, 0)), found)
    if isinstance(found.get("MESSAGES"), dict):
        found["MESSAGES"] = {name: Announced(name, layout) for name, layout in found["MESSAGES"].items()}
    step = found.get("step")
    if not isinstance(step, FunctionType):
        raise Rejected(Line(rank, 0), "has no function step(rt, batch)")
    for name, value in [*found.items()]:
        if isinstance(value, FunctionType) and value is not step and value.__module__ == "fxpipe_program":
            found[name] = sections.wrapped(value, buffer)
    return step
