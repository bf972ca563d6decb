"""Python source for the nodes of a section: one line per node, in terms of ``torch.ops.aten``."""

from __future__ import annotations

import cmath
import keyword
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpipe.ir.compat import OpOverload, registrar
from fxpipe.ir.graph import Input, Kind, Section, read_buffer
from fxpipe.ir.names import identifier, text_literal, unused
from fxpipe.ir.ops import is_between_lanes
from fxpipe.runtime.program.checks import expect
from fxpipe.runtime.program.random import keyed

#: The containers of inputs that are not values of other sections.
CONTAINERS = {
    Kind.PARAMETER: "params",
    Kind.ONCE: "once",
    Kind.BUFFER: "buffers",
    Kind.CONSTANT: "constants",
    Kind.BATCH: "batch",
    Kind.GRADIENT: "grads",
}
#: The arguments of a section's function by which it takes such inputs, and the random key.
ARGUMENTS = {**CONTAINERS, Kind.KEY: "key"}


#: The variables of keys of random ops: that of a microbatch, and that of a lane in it, or of each of so many
#: lanes that are so far behind each other.
KEY = re.compile(r"key|lane_key(?:_(\d+)_(\d+))?")

#: What a program whose microbatches have lengths uses itself, beside their variables.
OF_LENGTHS = ("layouts", "messages", "microbatches")

END = 2**63 - 1  # the end of a slice that has none

#: Names that a program uses itself: imports, definitions, arguments and variables.
_OF_PROGRAM = re.compile(
    r"rt|step|torch|lanes|keyed|expect|inductor|float|complex|MESSAGES|params|once|once_a_step|buffers|constants"
    rf"|counts|means|batch|batches|grads|{KEY.pattern}|m|i|at|carry|collected|within|range"
    r"|loss|count|from_[A-Z]\d+_to_[A-Z]\d+"
    r"|(saved|saved_for_weight|offloaded|offloaded_for_weight|gradients)\d*|collective\d+_\d+"
    r"|stage\d+_(forward|backward|weight)"
)
#: With any number of underscores behind: that of ``rt`` is ``rt_``, so that of ``rt_`` must be another one.
_TAKEN = re.compile(rf"({_OF_PROGRAM.pattern}|.*_s\d+|)_*")


def variable(name: str) -> str:
    """The variable for a node's value: the node's name, with an underscore if a program uses that name
    itself.

    Different nodes have different variables, also after ``_s1`` is added for a stage.
    """
    return f"{name}_" if _TAKEN.fullmatch(name) else name


def length_variables(names: Iterable[str]) -> list[str]:
    """The variables of lengths with these names, each another one."""
    variables: list[str] = []
    for name in names:
        text = variable(identifier(name))
        text = f"{text}_" if keyword.iskeyword(text) or text in OF_LENGTHS else text
        variables.append(unused(text, variables.__contains__))
    return variables


class Aliases:
    """The aliases of ops that a program's head declares: ``addmm = torch.ops.aten.addmm.default``.

    No alias is the name of a variable or of a function.
    """

    def __init__(self, sections: Iterable[Section], lengths: Sequence[str] = ()) -> None:
        """lengths: variables of lengths, which mean the same in all functions."""
        self.ops: dict[str, str] = {}  # alias -> dotted name
        self.registrars: set[tuple[str, str]] = set()  # the namespace of a library's ops, and its module
        self.uses_end = False
        self.uses_keyed = False
        self.uses_expect = False
        self.uses_within = False
        self.uses_inductor = False
        self._lengths = frozenset([*lengths, *OF_LENGTHS] if lengths else ())
        self._variables = {variable(node.name) for s in sections for node in s.graph.nodes} | self._lengths

    def new(self, name: str) -> str:
        """A name that resembles this one and that nothing else has."""
        variable = unused(name, lambda text: not self._is_free(text) or text in self.ops)
        self._variables.add(variable)
        return variable

    def local(self, name: str) -> str:
        """The name as a variable of some functions, in which it hides no op and no length."""
        variable = f"{name}_" if name in self.ops or name in self._lengths else name
        self._variables.add(variable)
        return variable

    def op(self, target: Any) -> str:
        packet, overload = target.overloadpacket, target._overloadname
        path = f"torch.ops.{target.namespace}.{packet.__name__}.{overload}"
        if is_between_lanes(target):  # a plain function, as run_local cannot leave the stack inside of an op
            path = f"lanes.{packet.__name__}"
        if (module := registrar(target)) is not None:
            self.registrars.add((target.namespace, module))
        alias = short = _alias(packet.__name__, overload)
        number = 1
        # Ops of two libraries may have one name: the second has that of its library before it.
        while not self._is_free(alias) or self.ops.setdefault(alias, path) != path:
            alias = f"{identifier(target.namespace)}_{short}" + (f"_{number}" if number > 1 else "")
            number += 1
        return alias

    def _is_free(self, alias: str) -> bool:
        is_name = alias.isidentifier() and not keyword.iskeyword(alias)
        return is_name and alias not in self._variables and not _OF_PROGRAM.fullmatch(alias)


def _alias(op: str, overload: str) -> str:
    bare = op.lstrip("_")
    alias = bare.rstrip("_")
    if overload not in ("default", "Tensor", "List", "int"):
        alias += f"_{overload.lower()}"
    return f"{alias}_" if bare.endswith("_") else alias


@dataclass(frozen=True)
class Scope:
    """How the values of nodes are called in a function.

    ``names``: the aliases of ops, of the whole program.  ``texts``: of values that are not called by the name
    of their node.  ``numbers``: by node, the expressions for its :func:`.free_numbers`.  ``inner``: nodes
    that have no variable, as the expression stands where the value is used.
    """

    names: Aliases
    texts: Mapping[fx.Node, str] = field(default_factory=dict)
    numbers: Mapping[fx.Node, tuple[str, ...]] = field(default_factory=dict)
    inner: set[fx.Node] = field(default_factory=set)

    def text(self, node: fx.Node) -> str:
        """A node's value: a variable, an item of a container, or the expression of one that is ``inner``."""
        if node in self.inner:
            return self.expression(node)
        if node in self.texts:
            return self.texts[node]
        source = node.meta.get("input") if node.op == "placeholder" else None
        if not isinstance(source, Input):
            return variable(node.name)
        return source.name if source.kind is Kind.KEY else item(source.kind, source.name)

    def expression(self, node: fx.Node) -> str:
        """The right-hand side for one op."""
        if node.target is operator.getitem:
            return f"{self.literal(node.args[0])}[{node.args[1]}]"
        if node.target is read_buffer:
            return self.literal(node.args[0])
        texts = self.numbers.get(node)
        numbers = None if texts is None else iter(texts[1:] if node.target is keyed else texts)
        arguments = [self.literal(a, numbers) for a in node.args]
        if texts is not None and node.target is keyed:
            arguments[1] = texts[0]
        arguments += [f"{k}={self.literal(v, numbers)}" for k, v in node.kwargs.items()]
        return f"{self._callee(node)}({', '.join(arguments)})"

    def _callee(self, node: fx.Node) -> str:
        if node.target is expect:
            self.names.uses_expect = True
            return "expect"
        if node.target is keyed:
            self.names.uses_keyed = True
            return "keyed"
        return self.names.op(node.target)

    def literal(self, value: object, numbers: Iterator[str] | None = None) -> str:
        """An argument as source."""
        match value:
            case fx.Node():
                return self.text(value)
            case list() | tuple():
                return f"[{', '.join(self.literal(v, numbers) for v in value)}]"
            case OpOverload():
                return self.names.op(value)
            case float():
                return number(value) if numbers is None else next(numbers)
            case complex() if not cmath.isfinite(value) or (not value.real and str(value)[0] in "-("):
                return f'complex("{value}")'  # as a literal, -7j has the real part -0.0
            case str():
                return text_literal(value)
            case torch.device():  # of the rank, so without the index of the process that traced the model
                return f'torch.device("{value.type}")'
            case int() if value == END:
                self.names.uses_end = True
                return "END"
            case None | bool() | int() | complex() | torch.dtype() | torch.memory_format() | torch.layout():
                return repr(value)
        raise TypeError(f"No source for an argument of type {type(value).__name__}: {value!r}")


def item(kind: Kind, name: str) -> str:
    """An item of a container, as source."""
    return f"{CONTAINERS[kind]}[{text_literal(name)}]"


def number(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'
