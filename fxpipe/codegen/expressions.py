"""Python source for the nodes of a section: one line per node, in terms of ``torch.ops.aten``."""

from __future__ import annotations

import cmath
import keyword
import operator
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxpipe.ir.compat import OpOverload
from fxpipe.ir.graph import Input, Kind, Section, read_buffer
from fxpipe.ir.names import identifier, text_literal
from fxpipe.runtime.program.checks import expect
from fxpipe.runtime.program.random import keyed

#: The containers of inputs that are not values of other sections.
CONTAINERS = {
    Kind.PARAMETER: "params",
    Kind.CAST: "casts",
    Kind.BUFFER: "buffers",
    Kind.CONSTANT: "constants",
    Kind.BATCH: "batch",
    Kind.GRADIENT: "grads",
}


#: Names that a program uses itself: imports, definitions, arguments, and variables without their ``_m0``.
_OWN = re.compile(
    r"rt|step|torch|keyed|expect|inductor|float|complex|MESSAGES|CASTS|params|casts|buffers|constants"
    r"|batch|batches|grads|key"
    r"|loss|count|from_[A-Z]\d+_to_[A-Z]\d+"
    r"|(saved|saved_for_weight|offloaded|offloaded_for_weight|gradients)\d*|collective\d+_\d+"
    r"|stage\d+_(forward|backward|weight)"
)
_TAKEN = re.compile(rf"({_OWN.pattern}|.*_s\d+|)_*")


def variable(name: str) -> str:
    """The variable for a node's value: the node's name, with an underscore if a program uses that name
    itself.

    Different nodes have different variables, also after ``_s1`` is added for a stage.
    """
    return f"{name}_" if _TAKEN.fullmatch(name) else name


class Names:
    """The aliases of ops that a program's head declares: ``addmm = torch.ops.aten.addmm.default``.

    No alias is the name of a variable.
    """

    def __init__(self, sections: Iterable[Section]) -> None:
        self.ops: dict[str, str] = {}  # alias -> dotted name
        self.uses_keyed = False
        self.uses_expect = False
        self._variables = {variable(node.name) for s in sections for node in s.graph.nodes}

    def op(self, target: Any) -> str:
        packet, overload = target.overloadpacket, target._overloadname
        path = f"torch.ops.{target.namespace}.{packet.__name__}.{overload}"
        alias = short = _alias(packet.__name__, overload)
        number = 1
        while not self._is_free(alias) or self.ops.setdefault(alias, path) != path:
            alias = f"{identifier(target.namespace)}_{short}" + (f"_{number}" if number > 1 else "")
            number += 1
        return alias

    def _is_free(self, alias: str) -> bool:
        is_name = alias.isidentifier() and not keyword.iskeyword(alias)
        return is_name and alias not in self._variables and not _OWN.fullmatch(alias)


def _alias(op: str, overload: str) -> str:
    bare = op.lstrip("_")
    alias = bare.rstrip("_")
    if overload not in ("default", "Tensor", "List", "int"):
        alias += f"_{overload.lower()}"
    return f"{alias}_" if bare.endswith("_") else alias


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
    """An argument as source: a node as its variable, an input as an item of its container."""
    match value:
        case fx.Node(op="placeholder") if isinstance(value.meta.get("input"), Input):
            given = value.meta["input"]
            if given.kind is Kind.KEY:
                return "key"
            return f"{CONTAINERS[given.kind]}[{text_literal(given.name)}]"
        case fx.Node():
            return variable(value.name)
        case list() | tuple():
            inner = ", ".join(literal(v, names) for v in value)
            return f"[{inner}]"
        case OpOverload():
            return names.op(value)
        case float() if value in (float("inf"), float("-inf")) or value != value:
            return f'float("{value}")'
        case complex() if not cmath.isfinite(value) or (not value.real and str(value)[0] in "-("):
            return f'complex("{value}")'  # as a literal, -7j has the real part -0.0
        case str():
            return text_literal(value)
        case torch.device():  # of the rank, so without the index of the process that traced the model
            return f'torch.device("{value.type}")'
        case (
            None
            | bool()
            | int()
            | float()
            | complex()
            | torch.dtype()
            | torch.memory_format()
            | torch.layout()
        ):
            return repr(value)
    raise TypeError(f"No source for an argument of type {type(value).__name__}: {value!r}")
