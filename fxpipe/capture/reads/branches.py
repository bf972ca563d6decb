"""Finds the question that a truth value answers: ops on one leaf of the microbatch, one after the other."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from fxpipe.plan.branches import MOST_CHARACTERS, OPS, op_text

aten = torch.ops.aten
_SAME = {aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh.default}


def question(node: fx.Node, needed: Collection[fx.Node]) -> tuple[fx.Node, tuple[str, ...]] | None:
    """The placeholder that a value is made from, and the ops, as ``Branch`` has them.

    needed: all nodes that lead to the value.  None where more than a line of ops of one tensor does.
    """
    ops, line = list[str](), {node}
    while node.op == "call_function":
        if node.target not in _SAME:
            op = _text(node)
            if op is None:
                return None
            ops.append(op)
        (node,) = node.all_input_nodes
        line.add(node)
    is_line = node.op == "placeholder" and line == {*needed}  # else other ops write to its memory
    return (node, (*reversed(ops),)) if is_line else None


def _text(node: fx.Node) -> str | None:
    """An op with its arguments behind the tensor; None for one that is not known."""
    name = str(node.target).removeprefix("aten.").removesuffix(".default")
    arguments, named = list(node.args[1:]), dict(node.kwargs)
    if node.target is aten._to_copy.default and {*named} <= {"dtype", "device"} and "dtype" in named:
        name, arguments, named = "to", [str(named["dtype"]).removeprefix("torch.")], {}
    if name not in OPS or named or node.args[:1] != (*node.all_input_nodes,):
        return None
    try:
        text = op_text(name, arguments)
    except TypeError:  # an argument that is no number
        return None
    return text if len(text) <= MOST_CHARACTERS else None
