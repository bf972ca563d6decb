"""The texts that a program forms: a tensor has another one here than in a run.

What ``print`` is given is not formed at all, as the check prints nothing.  Elsewhere a text may be formed of
plain data alone: numbers, texts, dtypes.
"""

from __future__ import annotations

import ast
from itertools import chain
from typing import Any

import torch

from fxpipe.certificate.values import Unread

#: Whose text is the same in every run; that of containers, if that of their items is.
_TOLD = (bool, complex, float, int, str, range, torch.device, torch.dtype, torch.layout, torch.memory_format)
_TOLD_BY_ITEMS = (tuple, list, set, frozenset, dict, torch.Size)
_TELL, _MOD = "?told", "?mod"  # names that no program can write


def without_texts(tree: ast.Module) -> ast.Module:
    """The program with no texts in what it prints, and with a question wherever it forms one elsewhere."""
    found: ast.Module = _Texts().visit(tree)
    return found


class _Texts(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            node.args = [_parts(argument) for argument in node.args]
        return self.generic_visit(node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        self.generic_visit(node)
        node.value = _called(_TELL, node.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Mod):
            return ast.copy_location(_called(_MOD, node.left, node.right), node)
        return node


def _called(name: str, *args: ast.expr) -> ast.Call:
    called = ast.copy_location(ast.Name(name, ast.Load()), args[0])
    return ast.copy_location(ast.Call(called, list(args), []), args[0])


def _parts(text: ast.expr) -> ast.expr:
    """What a text is formed of, without forming it."""
    match text:
        case ast.JoinedStr():
            parts = [part for part in text.values if isinstance(part, ast.FormattedValue)]
            specs = [_parts(part.format_spec) for part in parts if part.format_spec is not None]
            own: list[ast.expr] = [part.value for part in parts]
        case ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod()):
            own, specs = [text.right], []
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str()), attr="format")):
            own, specs = [*text.args, *(each.value for each in text.keywords)], []
        case _:
            return text
    return ast.copy_location(ast.Tuple([*own, *specs], ast.Load()), text)


def told(value: Any) -> Any:
    """Raises Unread for what has another text in a run."""
    if type(value) in _TOLD_BY_ITEMS:
        for each in chain(value, value.values() if isinstance(value, dict) else ()):
            told(each)
    elif value is not None and type(value) not in _TOLD:
        raise Unread("makes a text of what has none here, outside of print(…)")
    return value


def mod(left: Any, right: Any) -> Any:
    return left % (told(right) if isinstance(left, str | bytes) else right)


#: What programs call behind ``without_texts``.
QUESTIONS = {"str": lambda value="": str(told(value)), _TELL: told, _MOD: mod}
