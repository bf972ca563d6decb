"""The texts and numbers that a program makes of tensors: it may print them, and nothing else.

A tensor has another text here than in a run.  So what makes texts is a function of the certificate's, which
gives the text of plain data, and of all else what can be printed alone.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch

from fxpipe.certificate.programs.plain import ATOMS
from fxpipe.certificate.programs.values import Container, Leaves, Printed, Sum, Value, Within

_CONTAINERS = (tuple, list, dict, torch.Size)  # their text is that of their items
_UNREAD = (Value, Printed, Sum, Container, Leaves, Within)
_TEXT, _FORMAT, _MOD, _VIEW = "?text", "?format", "?mod", "?view"  # names that no program can write


def without_texts(tree: ast.Module) -> ast.Module:
    """The program with calls of ``QUESTIONS`` in the place of what makes texts, and of views of dicts, of
    which operators make sets."""
    found: ast.Module = _Texts().visit(tree)
    return found


class _Texts(ast.NodeTransformer):
    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.generic_visit(node)
        parts = [
            ast.Tuple([x.value, ast.Constant(x.conversion), x.format_spec or ast.Constant("")], ast.Load())
            if isinstance(x, ast.FormattedValue)
            else x
            for x in node.values
        ]
        return _called(node, _TEXT, parts)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(value, "format")):
                return _called(node, _FORMAT, [value, *node.args], node.keywords)
            case ast.Call(ast.Attribute(value, ("keys" | "items") as name), [], []):
                return _called(node, _VIEW, [value, ast.Constant(name)])
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return _called(node, _MOD, [node.left, node.right]) if isinstance(node.op, ast.Mod) else node


def _called(
    at: ast.expr, name: str, args: list[ast.expr], named: list[ast.keyword] | None = None
) -> ast.Call:
    made = ast.Call(ast.Name(name, ast.Load()), args, named or [])
    return ast.fix_missing_locations(ast.copy_location(made, at))


def _has_text(value: Any) -> bool:
    """Whether a value has the same text in every run."""
    if type(value) in _CONTAINERS:
        return all(map(_has_text, value)) and (type(value) is not dict or all(map(_has_text, value.values())))
    return type(value) in (*ATOMS, range)


def _text(*parts: Any) -> Any:
    """An f-string: of texts, and of values with their conversions and formats."""
    found = []
    for part in parts:
        if isinstance(part, tuple):
            value, conversion, spec = part
            if not _has_text(value) or not isinstance(spec, str):
                return Printed("a text")
            made = _CONVERSIONS[conversion](value)
            part = builtins.format(made, spec)
        found.append(part)
    return "".join(found)


_CONVERSIONS: dict[int, Callable[[Any], Any]] = {
    -1: lambda value: value,
    ord("s"): str,
    ord("r"): repr,
    ord("a"): ascii,
}


def _format(*_: Any, **__: Any) -> Printed:
    return Printed("a text")


def _mod(left: Any, right: Any) -> Any:
    is_text = isinstance(left, str | bytes)
    return Printed("a text") if is_text and not _has_text(right) else left % right


class _View:
    """The keys or items of a dict, without the operators that make sets."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, given: Mapping[Any, Any], name: str) -> None:
        self._read = getattr(given, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __contains__(self, one: Any) -> bool:
        return one in self._read()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _View) and self._read() == other._read()


def _view(given: Any, name: str) -> Any:
    return _View(given, name) if isinstance(given, Mapping) else getattr(given, name)()


def or_printed(function: Any) -> Any:
    """A function of Python; what it gives for tensors, or for what is computed of them, can be printed."""
    if not callable(function):
        return function

    @wraps(function, updated=())
    def call(*given: Any, **named: Any) -> Any:
        if any(isinstance(each, _UNREAD) for each in given):
            return Printed.function(function.__name__, *given)()
        return function(*given, **named)

    return call


def _if_told(name: str) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        if all(map(_has_text, given)):
            return getattr(builtins, name)(*given)
        return Printed(f"{name}(…)")

    return call


#: What programs call, beside their own functions and ops.
QUESTIONS = {
    **{name: _if_told(name) for name in ("str", "repr", "ascii", "format")},
    **{name: or_printed(getattr(builtins, name)) for name in ("bool", "complex", "float", "int", "len")},
    _TEXT: _text,
    _FORMAT: _format,
    _MOD: _mod,
    _VIEW: _view,
}
