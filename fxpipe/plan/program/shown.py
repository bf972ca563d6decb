"""What an edit may compute to look at it: expressions that change nothing, whatever the values are.

``print(f"{h.norm():.3f}")``, ``if m == 3:``, ``assert h.shape == (2, 5)``: attributes, functions of torch and
methods that give something and write to nothing, Python's own functions of values, and operators.
"""

from __future__ import annotations

import ast
from collections.abc import Set
from functools import cache
from typing import Any

import torch

_FUNCTIONS = frozenset({
    "abs", "all", "any", "ascii", "bool", "chr", "complex", "dict", "enumerate", "float", "format",
    "hasattr", "id", "int", "isinstance", "len", "list", "max", "min", "ord", "range", "repr",
    "reversed", "round", "sorted", "str", "sum", "tuple", "type", "zip",
})  # fmt: skip
_METHODS = frozenset({
    "bool", "cpu", "data_ptr", "dim", "double", "element_size", "endswith", "float", "format", "get",
    "get_device", "int", "is_contiguous", "items", "join", "keys", "long", "ndimension", "nelement",
    "numpy", "removeprefix", "size", "startswith", "storage_offset", "stride", "tolist", "type",
    "values",
})  # fmt: skip
_CHANGES_LISTS = frozenset({"sort"})
_ALLOWED = (
    ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Call, ast.keyword,
    ast.JoinedStr, ast.FormattedValue, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp,
    ast.Tuple, ast.List, ast.Dict, ast.Starred, ast.ListComp, ast.GeneratorExp, ast.comprehension,
    ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
_MODULES = ("torch", "math")


def names_shown(expression: ast.expr, bound: Set[str]) -> tuple[str, ...] | None:
    """The names that an expression reads, if it changes nothing; None if it might.

    bound: all names that the program gives a value anywhere; a function of Python's by such a name is none.
    """
    nodes = [*ast.walk(expression)]
    if not all(isinstance(node, _ALLOWED) and _is_harmless(node, bound) for node in nodes):
        return None
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    inner = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    known = inner | (_FUNCTIONS - bound) | {*_MODULES, "rt"}
    return tuple(dict.fromkeys(name for name in names if name not in known))


def _is_harmless(node: ast.AST, bound: Set[str]) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="rt"), attr=name):
            return name == "rank"
        case ast.Attribute(attr=name):
            return not name.startswith("_")
        case ast.Call(func=ast.Name(id=name), keywords=named):
            calls_another = any(each.arg in ("key", None) for each in named)
            return name in _FUNCTIONS and name not in bound and not calls_another
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math"))):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), keywords=named):
            return _gives_only(name) and not any(each.arg == "out" for each in named)
        case ast.Call(func=ast.Attribute(attr=name), keywords=named):
            is_plain = not any(each.arg == "out" for each in named)
            return is_plain and name not in _CHANGES_LISTS and (name in _METHODS or _gives_only(name))
        case ast.Call():
            return False
    return True


@cache
def _gives_only(name: str) -> bool:
    """Whether a method of tensors, or a function of torch of that name, gives something, changes nothing and
    draws no random numbers."""
    packet = getattr(torch.ops.aten, name, None)
    overloads: list[Any] = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    draws = any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)
    return any(map(_is_pure, overloads)) and not draws


def _is_pure(op: Any) -> bool:
    schema = op._schema
    takes_tensor = schema.arguments and "Tensor" in str(schema.arguments[0].type)
    return bool(schema.returns and not schema.is_mutable and takes_tensor)
