"""Lines for nodes: one per op, under a comment with its module and its line of the model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import PurePath
from typing import NamedTuple

from torch import fx

from fxpipe.codegen.comments import shape_of
from fxpipe.codegen.expressions import KEYS, Scope
from fxpipe.codegen.statements import Line
from fxpipe.ir.graph import Origin, offload, reload
from fxpipe.ir.names import comment
from fxpipe.ir.storage import is_view, written_arguments


def node_lines(nodes: Iterable[fx.Node], scope: Scope, place: Callable[[fx.Node], str]) -> Iterator[Line]:
    """Lines that are freed behind each of the model's lines.

    ``place``: the text of a module, for the comment above its ops.  Where another line of the model begins in
    the same module, its number stands behind the op.
    """
    written = [n for n in nodes if n.target not in (offload, reload) and not is_item_of_unpacked(n)]
    before, heading = None, ""
    for where, own in groupby(written, lambda node: _where(node, place)):
        if before is None or where.module != before.module:
            heading, note = comment(where.text), ""
        else:
            note = where.behind(before)
        first, *others = own
        last = others[-1] if others else first
        for node in (first, *others):
            remarks = [text for text in (note if node is first else "", shape_of(node)) if text]
            behind = f"  {comment('  '.join(remarks))}" if remarks else ""
            text = f"{_targets(node, scope)}{scope.expression(node)}{behind}"
            yield Line(text, reads(node, scope), heading, frees=node is last)
        before = where


class _Where(NamedTuple):
    """An origin in comments."""

    module: str
    file: str
    line: str

    @property
    def text(self) -> str:
        return f"{self.module}  ({self.file}:{self.line})" if self.line else self.module

    def behind(self, other: _Where) -> str:
        """``:18``, after another place in the same module; with the file if that is another."""
        return f"{self.file if self.file != other.file else ''}:{self.line}" if self.line else ""


def _where(node: fx.Node, place: Callable[[fx.Node], str]) -> _Where:
    file, _, line = node.meta["origin"].source.rpartition(":")
    return _Where(place(node), PurePath(file).name, line)


def reads(node: fx.Node, scope: Scope) -> tuple[str, ...]:
    """The variables of tensors that an op reads."""
    texts = (scope.text(n) for n in node.all_input_nodes if not is_unpacked(n))
    return tuple(text for text in texts if text.isidentifier() and text not in KEYS)


def defined(node: fx.Node, scope: Scope) -> tuple[str, ...]:
    """The variables that an op's line assigns."""
    if node.target in (offload, reload) or is_item_of_unpacked(node):
        return ()
    return tuple(map(scope.text, node.users if is_unpacked(node) else [node]))


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


def place(node: fx.Node) -> str:
    """``blocks.3.att``."""
    origin: Origin = node.meta["origin"]
    return origin.path or ("the model itself" if origin.source else "autograd")
