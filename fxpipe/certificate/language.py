"""The part of Python that a program may be made of, such that its text says what it does.

Beside ops on tensors a program has loops over plain data, branches on numbers, and prints.  Rejected is what
could tell this run from another, as the type of a value, an error that is caught or a state of torch, and
what may never end.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from fxpipe.certificate.problems import Line, Rejected
from fxpipe.certificate.values import Printed, is_printed_method

_STATEMENTS: dict[type[ast.AST], str] = {
    ast.Try: "catches errors",
    ast.TryStar: "catches errors",
    ast.With: "has a with block",
    ast.While: "has a while loop, which may never end",
    ast.Nonlocal: "sets a variable of another function",
    ast.ClassDef: "has a class",
    ast.Yield: "has a generator",
    ast.YieldFrom: "has a generator",
    ast.AsyncFunctionDef: "has an asynchronous function",
}
_BUILTINS = (
    "abs", "all", "any", "bool", "complex", "dict", "divmod", "enumerate", "filter", "float", "frozenset",
    "int", "len", "list", "map", "max", "min", "next", "pow", "print", "reversed", "round", "set", "slice",
    "sorted", "str", "sum", "tuple", "zip",
)  # fmt: skip
_LONGEST = 1_000_000  # rounds of a loop


def check_language(tree: ast.Module, rank: int) -> None:
    """Raises Rejected with the line of what a program has no use for."""
    for node in ast.walk(tree):
        what = _STATEMENTS.get(type(node), "")
        if isinstance(node, ast.Attribute) and node.attr.startswith("__"):
            what = f"uses .{node.attr}"
        if what:
            raise Rejected(Line(rank, node.lineno), f"{what}, which is not checked")  # type: ignore[attr-defined]


def builtins_of_programs(line: Callable[[], Line]) -> dict[str, Any]:
    """By name; errors may be raised, all others cannot be called."""

    def counted(*given: int) -> range:
        found = range(*given)
        if len(found) > _LONGEST:
            raise Rejected(line(), f"has a loop of {len(found)} rounds, and {_LONGEST} are the most")
        return found

    def able(name: str) -> Any:
        found = getattr(builtins, name)
        is_error = isinstance(found, type) and issubclass(found, BaseException)
        return found if name in _BUILTINS or is_error or not callable(found) else Refused(name, line)

    return {**{name: able(name) for name in dir(builtins)}, "range": counted}


class Refused:
    """What a program may name, and not use."""

    def __init__(self, name: str, line: Callable[[], Line]) -> None:
        self._name, self._line = name, line

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise Rejected(self._line(), f"calls {self._name}, which the certificate does not run")

    def __getattr__(self, name: str) -> Refused:
        return Refused(f"{self._name}.{name}", self._line)

    def __bool__(self) -> bool:
        raise Rejected(self._line(), f"reads {self._name}, which the certificate does not know")


class Torch:
    """``torch`` in a program: its ops make terms, its dtypes and the like are torch's, and what a function
    gives for a tensor can be printed."""

    def __init__(self, ops: Any, line: Callable[[], Line]) -> None:
        self.ops, self._line = ops, line

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if found in (torch.device, torch.Tensor) or isinstance(found, _PLAIN):
            return found
        is_printed = not isinstance(found, ModuleType) and is_printed_method(name)
        return Printed.function(name) if is_printed else Refused(f"torch.{name}", self._line)


_PLAIN = (torch.dtype, torch.layout, torch.memory_format, float)
