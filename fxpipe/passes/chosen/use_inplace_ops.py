"""Lets results overwrite operands that are used for the last time.

before: b = mul(a, 0.5)                   a: made by the same stage, dense, used for the last time
after:  b = mul.out(a, 0.5, out=a)

Elementwise ops overwrite any such operand; other ops with an in-place form overwrite their first operand, if
no other argument reads it.  Results are bit-identical; but half of the memory that the op touches is already
in the caches, and less memory is live.

Inductor plans the memory of what it compiles by itself: no op of that is rewritten.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import fx

from fxpipe.ir.compat import Argument, OpOverload, has_kernel, pytree
from fxpipe.ir.compiled import compiled_ops
from fxpipe.ir.storage import call_nodes, is_view, last_uses, node_bytes, storage_roots, written
from fxpipe.plan.tensors import is_dense
from fxpipe.runtime.torch_private import schema_of
from fxpipe.schedule.ops import Phase


def use_inplace_ops(graph: fx.Graph, compiled_phases: Collection[Phase] = ()) -> None:
    roots = storage_roots(graph)
    last = last_uses(graph, roots)
    compiled = compiled_ops(graph, compiled_phases)
    for node in call_nodes(graph):
        if is_view(node) or node in compiled:
            continue
        used = [roots[n] for n in node.all_input_nodes]
        free = [
            n
            for n, root in zip(node.all_input_nodes, used, strict=True)
            # A second operand in the same memory would be read after it is overwritten.
            if last.get(root) is node and used.count(root) == 1 and _same_place(n, root, node)
        ]
        if free:
            _write_over(node, free)


def _same_place(operand: fx.Node, root: fx.Node, result: fx.Node) -> bool:
    """Whether the operand fills its storage, and the result has the same layout."""
    a, b = operand.meta.get("val"), result.meta.get("val")
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and (a.dtype, a.device, a.shape, a.stride()) == (b.dtype, b.device, b.shape, b.stride())
        and is_dense(a)
        # Else the result would keep a larger storage alive.
        and node_bytes(root) == node_bytes(operand)
    )


def _write_over(node: fx.Node, free: list[fx.Node]) -> None:
    """Let the op overwrite one of its operands, if it has a form that does so: that computed last.

    So the first layer of a stage, to which another stage gives a value that it must not overwrite, has the
    same ops as the next ones.
    """
    device = node.meta["val"].device.type
    if (form := _out_form(node.target, device)) is not None:
        node.target, name = form
        node.kwargs = {**node.kwargs, name: max(free)}
    elif node.args and node.args[0] in free:
        operands = pytree.tree_leaves((node.args, node.kwargs))
        if sum(x is node.args[0] for x in operands) == 1:  # ``addmm_(x, a, x)`` would read its own output
            node.target = _in_place_form(node.target, device) or node.target


@cache
def _out_form(target: Any, device: str) -> tuple[OpOverload, str] | None:
    """The out variant of an elementwise op, and the name of its output argument."""
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        for form in _forms(target.overloadpacket):
            *operands, last = schema_of(form).arguments
            if last.kwarg_only and written(form) == (last.name,) and _fits(form, operands, target, device):
                return form, last.name
    return None


@cache
def _in_place_form(target: object, device: str) -> OpOverload | None:
    if isinstance(target, OpOverload) and target.namespace == "aten":
        for form in _forms(getattr(torch.ops.aten, f"{target.overloadpacket.__name__}_", None)):
            parameters = schema_of(form).arguments
            if written(form) == (parameters[0].name,) and _fits(form, parameters, target, device):
                return form
    return None


def _forms(packet: Any) -> list[OpOverload]:
    return [] if packet is None else [getattr(packet, name) for name in packet.overloads()]


def _fits(form: Any, operands: list[Argument], target: object, device: str) -> bool:
    """Whether the form accepts the op's arguments and has its own kernel; other forms compute a new tensor
    and copy it."""
    one, other = ([(a.name, str(a.type)) for a in x] for x in (operands, schema_of(target).arguments))
    return one == other and has_kernel(form, device)
