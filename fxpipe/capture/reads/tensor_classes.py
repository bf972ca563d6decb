"""Finds comparisons of a tensor's own class, which is another one in a trace.

type(x) is torch.Tensor        false in a trace, whose tensors are of a subclass
isinstance(x, torch.Tensor)    true
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Collection, Iterable, Iterator

from fxpipe.runtime.functions import names_in

_CLASSES = ("Tensor", "Parameter")


def compared_classes(reached: Iterable[object], files: Collection[str]) -> list[str]:
    """The places, as file and line, where functions compare the class of something with a tensor's.

    reached: what a model's code names, some of which it never runs.  files: those of the code that runs.
    """
    functions = [x for x in reached if isinstance(x, types.FunctionType) and x.__code__.co_filename in files]
    return sorted({place for x in functions for place in _in_function(x)})


def _in_function(function: types.FunctionType) -> Iterator[str]:
    # Most functions name neither: their source is not read.
    names = names_in(function.__code__)
    if "type" not in names.globals and "__class__" not in names.attributes:
        return
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # made at run time, or a lambda within an expression
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = node.left, *node.comparators
            if any(map(_is_class, sides)) and any(map(_names_a_tensor, sides)):
                yield f"{inspect.getsourcefile(function)}:{first + node.lineno - 1}"


def _is_class(node: ast.expr) -> bool:
    """``type(x)``, ``x.__class__``, or the name of one of them."""
    if isinstance(node, ast.Attribute) and node.attr in ("__name__", "__qualname__"):
        return _is_class(node.value)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1
    return isinstance(node, ast.Attribute) and node.attr == "__class__"


def _names_a_tensor(node: ast.expr) -> bool:
    """Whether an expression names a tensor's class, or, for ``in``, a tuple with one."""
    match node:
        case ast.Tuple(elts=several) | ast.List(elts=several) | ast.Set(elts=several):
            return any(map(_names_a_tensor, several))
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
            return name in _CLASSES
    return False
