"""The part of Python that a program may be made of, such that its text says what it does.

Beside ops on tensors a program has loops over plain data, branches on numbers, and prints.  Rejected is what
could tell this run from another, as the type or the identity of a value, the order of a set, an error that is
caught or a state of torch, and what may never end.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import math
import operator
import typing
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from fxpipe.certificate.problems import Line, Rejected
from fxpipe.certificate.programs.texts import QUESTIONS, or_printed
from fxpipe.certificate.programs.values import Printed, is_printed_method

_REFUSED: dict[type[ast.AST], str] = {
    ast.Try: "catches errors",
    ast.TryStar: "catches errors",
    ast.With: "has a with block",
    ast.While: "has a while loop, which may never end",
    ast.Match: "has a match statement",  # asks for types
    ast.Nonlocal: "sets a variable of another function",
    ast.ClassDef: "has a class",
    ast.Yield: "has a generator",
    ast.YieldFrom: "has a generator",
    ast.Set: "has a set, whose order differs from run to run",
    ast.SetComp: "has a set, whose order differs from run to run",
    ast.AsyncFunctionDef: "has an asynchronous function",
}
_ALLOWED = (
    ast.Module, ast.FunctionDef, ast.Lambda, ast.arguments, ast.arg, ast.Return, ast.Import, ast.ImportFrom,
    ast.alias, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.Delete, ast.Expr, ast.Pass,
    ast.For, ast.Break, ast.Continue, ast.If, ast.IfExp, ast.Assert, ast.Raise, ast.comprehension,
    ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.List, ast.Tuple, ast.Dict, ast.Constant, ast.JoinedStr,
    ast.FormattedValue, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Starred, ast.Call, ast.keyword,
    ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.expr_context, ast.boolop, ast.operator, ast.unaryop,
    ast.cmpop,
)  # fmt: skip
_BUILTINS = (
    "abs", "all", "any", "bool", "complex", "dict", "divmod", "enumerate", "filter", "float", "int", "len",
    "list", "map", "max", "min", "next", "pow", "reversed", "round", "slice", "sorted", "sum", "tuple", "zip",
)  # fmt: skip
#: What a program may import beside torch and fxpipe's own, without what reads any attribute of a value.
_HARMLESS = {
    "__future__": ("annotations",),
    "math": tuple(name for name in dir(math) if not name.startswith("_")),
    "operator": tuple({*operator.__all__} - {"attrgetter", "methodcaller", "is_", "is_not", "mod", "imod"}),
}
#: Of texts, and of dicts: sets are made of the latter.  Their calls are ``texts.py``'s.
_METHODS = ("format", "format_map", "keys", "items")
_SHIFTS = ("__lshift__", "__rshift__")  # torch.ops.aten has them by these names
_LONGEST = 1_000_000  # rounds of all loops


def check_language(tree: ast.Module, rank: int) -> None:
    """Raises Rejected with the line of what a program has no use for."""
    for node in ast.walk(tree):
        what = _REFUSED.get(type(node), "" if isinstance(node, _ALLOWED) else f"has a {type(node).__name__}")
        match node:
            case ast.Global(names=names):
                what = f"sets the global {', '.join(names)}"
            case ast.Attribute(ctx=ast.Store() | ast.Del(), attr=name):
                what = f"sets the attribute {name}"
            case ast.Attribute(attr=name) if name in _SHIFTS:
                pass
            case ast.Attribute(attr=name) if name.startswith("__") or name in _METHODS:
                what = f"uses .{name}"
            case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                pass
            case ast.Compare() if any(isinstance(each, ast.Is | ast.IsNot) for each in node.ops):
                what = "asks whether two values are one object"
            case ast.Name(id=name) if name.startswith("__"):
                what = f"uses {name}"
            case ast.AugAssign(op=ast.Mod()):
                what = "uses %="
        if what:
            raise Rejected(Line(rank, getattr(node, "lineno", 0)), f"{what}, which is not checked")


def builtins_of_programs(line: Callable[[], Line]) -> dict[str, Any]:
    """By name; errors may be raised, all others cannot be called."""

    rounds = 0

    def counted(*given: int) -> range:
        nonlocal rounds
        found = range(*given)
        rounds += len(found)
        if rounds > _LONGEST:
            raise Rejected(line(), f"has loops of {rounds} rounds, and {_LONGEST} are the most")
        return found

    def able(name: str) -> Any:
        found = getattr(builtins, name)
        is_error = isinstance(found, type) and issubclass(found, BaseException)
        return found if name in _BUILTINS or is_error or not callable(found) else Refused(name, line)

    own = {
        "range": counted,
        "print": lambda *_, **__: None,
        "breakpoint": lambda *_, **__: None,
        **QUESTIONS,
    }
    return {name: able(name) for name in dir(builtins)} | own


def harmless(name: str, line: Callable[[], Line]) -> Any:
    """A module of Python that a program may import; None for others."""
    if name == "typing":  # for annotations
        return SimpleNamespace(**{each: Refused(f"typing.{each}", line) for each in typing.__all__})
    found = importlib.import_module(name) if name in _HARMLESS else None
    return found and SimpleNamespace(**{each: or_printed(getattr(found, each)) for each in _HARMLESS[name]})


class Refused:
    """What a program may name, and not use."""

    def __init__(self, name: str, line: Callable[[], Line]) -> None:
        self._name, self._line = name, line

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise Rejected(self._line(), f"calls {self._name}, which the certificate does not run")

    def __getattr__(self, name: str) -> Refused:
        return Refused(f"{self._name}.{name}", self._line)

    def __getitem__(self, _: Any) -> Refused:
        return self

    __or__ = __ror__ = __getitem__

    def __bool__(self) -> bool:
        raise Rejected(self._line(), f"reads {self._name}, which the certificate does not know")


class Torch:
    """``torch`` in a program: its ops make terms, its dtypes and the like are torch's, and what a function
    gives for a tensor can be printed."""

    def __init__(self, ops: Any, line: Callable[[], Line]) -> None:
        self.ops, self._line = ops, line

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if found is torch.device or isinstance(found, _PLAIN):
            return found
        is_printed = not isinstance(found, ModuleType) and is_printed_method(name)
        return Printed.function(name) if is_printed else Refused(f"torch.{name}", self._line)


_PLAIN = (torch.dtype, torch.layout, torch.memory_format, float)
