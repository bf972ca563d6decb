"""Python source for the nodes of a section: one line a node, in the words of ``torch.ops.aten``."""

from __future__ import annotations

import json
import operator
from typing import Any

import torch
from torch import fx

from fxpipe.graph import Input, Kind, read_buffer
from fxpipe.runtime.checks import expect
from fxpipe.runtime.random import keyed

#: Where the generated functions find their inputs that are no values of other sections.
CONTAINERS = {
    Kind.PARAMETER: "params",
    Kind.BUFFER: "buffers",
    Kind.CONSTANT: "constants",
    Kind.BATCH: "batch",
    Kind.GRADIENT: "grads",
}


class Names:
    """The aliases of ops that a program's head declares: ``addmm = aten.addmm.default``."""

    def __init__(self) -> None:
        self.ops: dict[str, str] = {}  # alias -> dotted name
        self.uses_keyed = False
        self.uses_expect = False

    def op(self, target: Any) -> str:
        packet, overload = target.overloadpacket, target._overloadname
        bare = packet.__name__.lstrip("_")
        alias = bare.rstrip("_")
        if overload not in ("default", "Tensor", "int"):
            alias += f"_{overload.lower()}"
        if bare.endswith("_"):
            alias += "_"
        dotted = f"torch.ops.{target.namespace}.{packet.__name__}.{overload}"
        while self.ops.setdefault(alias, dotted) != dotted:
            alias += "_"
        return alias


def expression(node: fx.Node, names: Names) -> str:
    """The right-hand side for one op."""
    if node.target is operator.getitem:
        return f"{literal(node.args[0], names)}[{node.args[1]}]"
    if node.target is read_buffer:
        return literal(node.args[0], names)
    if node.target is expect:
        names.uses_expect = True
        callee = "expect"
    elif node.target is keyed:
        names.uses_keyed = True
        callee = "keyed"
    else:
        callee = names.op(node.target)
    arguments = [literal(a, names) for a in node.args]
    arguments += [f"{k}={literal(v, names)}" for k, v in node.kwargs.items()]
    return f"{callee}({', '.join(arguments)})"


def literal(value: Any, names: Names) -> str:
    """An argument as source: a node by its name, an input by its place in its container."""
    match value:
        case fx.Node(op="placeholder") if isinstance(value.meta.get("input"), Input):
            given = value.meta["input"]
            return "key" if given.kind is Kind.KEY else f"{CONTAINERS[given.kind]}[{json.dumps(given.name)}]"
        case fx.Node():
            return value.name
        case list() | tuple():
            inner = ", ".join(literal(v, names) for v in value)
            return f"[{inner}]"
        case torch._ops.OpOverload():
            return names.op(value)
        case float() if value in (float("inf"), float("-inf")) or value != value:
            return f'float("{value}")'
        case torch.device():
            return f'torch.device("{value.type}")' if value.index is None else f'torch.device("{value}")'
        case (
            None
            | bool()
            | int()
            | float()
            | complex()
            | str()
            | torch.dtype()
            | torch.memory_format()
            | torch.layout()
        ):
            return repr(value)
    raise TypeError(f"No source for an argument of type {type(value).__name__}: {value!r}")
