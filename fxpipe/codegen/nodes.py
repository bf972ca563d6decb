"""Lines for nodes: one per op, under a comment with its module and its line of the model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath

from torch import fx

from fxpipe.codegen.comments import shape_comment
from fxpipe.codegen.expressions import Scope
from fxpipe.codegen.statements import Line
from fxpipe.ir.graph import Origin, offload, reload
from fxpipe.ir.names import comment
from fxpipe.ir.storage import is_view, written_arguments


def node_lines(nodes: Iterable[fx.Node], scope: Scope, place: Callable[[Origin], str]) -> Iterator[Line]:
    """``place``: the text of the comment above ops of an origin."""
    for node in nodes:
        if node.target not in (offload, reload) and not is_item_of_unpacked(node):
            heading = comment(place(node.meta["origin"]))
            text = f"{_targets(node, scope)}{scope.expression(node)}{shape_comment(node)}"
            yield Line(text, reads(node, scope), heading)


def reads(node: fx.Node, scope: Scope) -> tuple[str, ...]:
    """The variables of tensors that an op reads."""
    texts = (scope.text(n) for n in node.all_input_nodes if not is_unpacked(n))
    return tuple(text for text in texts if text.isidentifier() and text != "key")


def storages(nodes: Iterable[fx.Node], scope: Scope) -> dict[str, str]:
    """By the variable of each op's result, the variable or item of a container with the same storage."""
    found: dict[str, str] = {}
    for node in nodes:
        written = written_arguments(node.target, node.args, node.kwargs)
        same = node.args[0] if is_view(node) else next(iter(written), None)
        if isinstance(same, fx.Node):
            text = scope.text(same)
            found[scope.text(node)] = found.get(text, text)
    return found


def _targets(node: fx.Node, scope: Scope) -> str:
    """The left-hand side with its ``=``; empty for an op that only writes to its arguments."""
    if is_unpacked(node):
        items = {int(u.args[1]): scope.text(u) for u in node.users}  # type: ignore[arg-type]
        return ", ".join(items.get(i, "_") for i in range(len(node.meta["val"]))) + " = "
    return f"{scope.text(node)} = " if node.users else ""


def is_unpacked(node: fx.Node) -> bool:
    """Whether the op's tuple is unpacked in the line that computes it."""
    val = node.meta.get("val")
    if node.op != "call_function" or not isinstance(val, (tuple, list)) or len(val) < 2:
        return False
    return all(user.target is operator.getitem for user in node.users)


def is_item_of_unpacked(node: fx.Node) -> bool:
    return node.target is operator.getitem and is_unpacked(node.args[0])  # type: ignore[arg-type]


def source_line(origin: Origin) -> str:
    """``(net.py:17)``."""
    file, _, line = origin.source.rpartition(":")
    return f"({PurePath(file).name}:{line})" if origin.source else ""


def place(origin: Origin) -> str:
    """``blocks.3.att  (net.py:17)``."""
    if not origin.path and not origin.source:
        return "autograd"
    return f"{origin.path or 'the model itself'}  {source_line(origin)}".rstrip()
