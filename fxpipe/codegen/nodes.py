"""Lines for nodes: one per op, under a comment with its module and its line of the model."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import fx

from fxpipe.codegen.comments import shape_of
from fxpipe.codegen.expressions import KEY, Scope
from fxpipe.codegen.layers.repeats import leaves
from fxpipe.codegen.statements import Statement
from fxpipe.codegen.wrapping import WIDTH
from fxpipe.ir.graph import Origin, offload, read_buffer, reload
from fxpipe.ir.names import comment
from fxpipe.ir.ops import begins_backward, has_flops
from fxpipe.ir.size import Share
from fxpipe.ir.storage import is_view, written_arguments

aten = torch.ops.aten


def node_lines(
    nodes: Sequence[fx.Node],
    scope: Scope,
    place: Callable[[fx.Node], str],
    named: AbstractSet[fx.Node] = frozenset(),
    shape: Callable[[fx.Node], str] = shape_of,
) -> Iterator[Statement]:
    """Lines that are freed behind each of the model's lines.

    ``place``: the text of a module, for the comment above its ops.  Where another line of the model begins in
    the same module, its number stands behind the op.  ``named``: nodes that must have a variable.  ``shape``:
    what to say of an op's shape behind it.
    """
    _find_inner(nodes, scope, named)
    _find_computed(nodes, scope, named)
    written = [n for n in nodes if n not in scope.inner and _has_line(n)]
    before, heading = None, ""
    for line, group in groupby(written, lambda node: _line(_computing(node, scope), place)):
        ops = [*group]
        where = line or before or _where(ops[0], place)
        if before is None or where.module != before.module:
            heading, note = comment(where.text), ""
        else:
            note = where.behind(before) if where != before else ""
        for node in ops:
            remarks = [note if node is ops[0] else "", _reason(node), shape(_computing(node, scope))]
            behind = f"  {comment('  '.join(filter(None, remarks)))}" if any(remarks) else ""
            text = f"{_targets(node, scope)}{scope.expression(node)}{behind}"
            yield Statement(text, reads(node, scope), heading, node is ops[-1], _allocates(node, scope))
        before = where


def _has_line(node: fx.Node) -> bool:
    return node.target not in (offload, reload) and not is_item_of_unpacked(node)


def _find_inner(nodes: Sequence[fx.Node], scope: Scope, named: AbstractSet[fx.Node]) -> None:
    """Write a view where it is used, if that is in one place, whose line stays one."""
    here = set(nodes)
    for node in nodes:
        user = next(iter(node.users), node)
        if node in named or len(node.users) != 1 or user not in here or not _has_line(user):
            continue
        if not is_view(node) or node.target in (operator.getitem, offload, reload):
            continue
        if user.target is operator.getitem or node in written_arguments(user.target, user.args, user.kwargs):
            continue
        scope.inner.add(node)  # to see how long the line becomes, in a function, whose body is indented by 4
        times = sum(leaf is node for leaf in leaves(user))
        if times > 1 or len(_targets(user, scope) + scope.expression(user)) > WIDTH - 4:
            scope.inner.remove(node)


def _find_computed(nodes: Sequence[fx.Node], scope: Scope, named: AbstractSet[fx.Node]) -> None:
    """Write an op in the line of a view, if that is the next one, the only one to read the result, and stays
    one line."""
    lines = [node for node in nodes if node not in scope.inner and _has_line(node)]
    for node, view in pairwise(lines):
        if node in named or len(node.users) != 1 or _source(view, scope) is not node or is_unpacked(node):
            continue
        if node.target in (operator.getitem, offload, reload, read_buffer) or is_view(node):
            continue
        if not any(written_arguments(node.target, node.args, node.kwargs)):
            scope.inner.add(node)
            if len(_targets(view, scope) + scope.expression(view)) > WIDTH - 4:
                scope.inner.remove(node)


def _source(node: fx.Node, scope: Scope) -> fx.Node | None:
    """The value of which a view is made, behind the views in its line; None of what is no view."""
    if not is_view(node) or node.target is operator.getitem:
        return None
    source: Any = node.args[0]
    while source in scope.inner and is_view(source):
        source = source.args[0]
    return source  # type: ignore[no-any-return]


def _computing(node: fx.Node, scope: Scope) -> fx.Node:
    """The op that computes in the line of a view; the line's op itself where it is another one."""
    source = _source(node, scope)
    return source if source is not None and source in scope.inner else node


def _allocates(node: fx.Node, scope: Scope) -> bool:
    """Whether the line of an op may need new memory: it is no view of what is there, and does not write its
    result over an operand.  Products may need some to compute."""
    if _computing(node, scope) is not node or has_flops(node):
        return True
    return not is_view(node) and not any(written_arguments(node.target, node.args, node.kwargs))


def _reason(node: fx.Node) -> str:
    """What the number is that a backward starts from: the loss is the mean of those of the microbatches."""
    is_number = begins_backward(node) and not isinstance(node.args[1], Share)
    return "1 / microbatches" if is_number and node.args[1] != 1 else ""


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


def _line(node: fx.Node, place: Callable[[fx.Node], str]) -> _Where | None:
    """The line of the model; None of autograd's sums of gradients, which stand under the comment before."""
    origin: Origin = node.meta["origin"]
    is_sum = node.target in (aten.add.Tensor, aten.add.out) and origin.backward and origin.seq is None
    return None if is_sum else _where(node, place)


def _where(node: fx.Node, place: Callable[[fx.Node], str]) -> _Where:
    file, _, line = node.meta["origin"].source.rpartition(":")
    return _Where(place(node), os.path.basename(file), line)


def reads(node: fx.Node, scope: Scope) -> tuple[str, ...]:
    """The variables of tensors that an op reads."""
    texts: list[str] = []
    for n in node.all_input_nodes:
        if n in scope.inner:
            texts += reads(n, scope)
        elif not is_unpacked(n):
            texts.append(scope.text(n))
    return tuple(text for text in texts if text.isidentifier() and not KEY.fullmatch(text))


def defined(node: fx.Node, scope: Scope) -> tuple[str, ...]:
    """The variables that an op's line assigns."""
    if node.target in (offload, reload) or is_item_of_unpacked(node):
        return ()
    return tuple(map(scope.text, node.users if is_unpacked(node) else [node]))


def storages(nodes: Iterable[fx.Node], scope: Scope) -> dict[str, str]:
    """Map the variable of each op's result to the variable or item of a container with the same storage."""
    known: dict[str, str] = {}
    for node in nodes:
        written = written_arguments(node.target, node.args, node.kwargs)
        same: object = node.args[0] if is_view(node) else next(iter(written), None)
        while same in scope.inner:
            same = same.args[0] if is_view(same) else None
        if isinstance(same, fx.Node) and node not in scope.inner:
            text = scope.text(same)
            known[scope.text(node)] = known.get(text, text)
    return known


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
    return origin.path or "the model itself"
