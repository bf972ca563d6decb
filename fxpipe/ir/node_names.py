"""The names of nodes: the module that computes a value, and the op, or the op's name for the value.

h_3_mlp_mul        a value of the forward: the module, and the op
d_h_3_mlp_mul      its gradient: whatever begins with d_ is the gradient of what follows
d_h_3_add_via_mul  a summand of the gradient of h_3_add, which comes from its use in the op mul
bwd_h_3_mlp_sum    any other value that the backward computes
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import fx

from fxpipe.ir.compat import OpOverload
from fxpipe.ir.graph import Origin
from fxpipe.ir.names import identifier
from fxpipe.runtime.torch_private import schema_of

aten = torch.ops.aten

#: Ops whose result is their operand.
SAME_VALUE = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}

#: Begins the names of values of the backward that are no gradients.
BACKWARD = "bwd_"


@dataclass(frozen=True, slots=True)
class Named:
    """A value of the forward, or a parameter: its name, and the path of its module."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a node of the backward is (``meta["gradient"]``): the gradient of a value, or a summand of that.

    ``via``: of a summand, the use of the value that it comes from: a module, or an op.
    """

    of: Named
    via: str = ""

    @property
    def name(self) -> str:
        return gradient_name(self.of.name, self.via)


def gradient_name(value: str, via: str) -> str:
    return f"d_{value.lstrip('_')}" + (f"_via_{via}" if via else "")


def node_name(node: fx.Node, origin: Origin, short: Mapping[str, str]) -> str:
    """The name of a node that is no gradient.  short: by module path."""
    what = _item(node) if node.target is operator.getitem else _op(node.target)
    if isinstance(node.meta.get("val"), tuple | list):
        what += "_results"  # so that the first of them can have the op's name
    return _name(what, origin, short)


def op_name(target: object, origin: Origin, short: Mapping[str, str]) -> str:
    """The name of a new op with one result."""
    return _name(_op(target), origin, short)


def parameter_name(name: str, short: Mapping[str, str]) -> Named:
    """A parameter, with a name like those of values of its module."""
    path, _, leaf = name.rpartition(".")
    return Named(identifier(f"{short.get(path) or path}.{leaf}"), path)


def _name(what: str, origin: Origin, short: Mapping[str, str]) -> str:
    name = identifier(f"{short.get(origin.path) or 'model'}.{what}")
    if origin.backward:
        return BACKWARD + name.lstrip("_")
    return f"model_{name}" if name.startswith(("d_", BACKWARD)) else name


def short_paths(paths: Set[str]) -> dict[str, str]:
    """Module paths for names: the shortest end that no other path has, with all numbers, and none in front.

    Paths that differ in numbers alone are shortened alike: transformer.h.3.attn is h.3.attn, in every layer.
    """
    owners: defaultdict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
    for path in paths:
        blank = _blank(path)
        for end in _ends(blank):
            owners[end].add(blank)
    return {path: _short(path, owners) for path in paths}


def _short(path: str, owners: dict[tuple[str, ...], set[tuple[str, ...]]]) -> str:
    blank = _blank(path)
    for end in _ends(blank):
        keeps_numbers = end.count("#") == blank.count("#") and end[0] != "#"
        if keeps_numbers and len(owners[end]) == 1:
            return ".".join(path.split(".")[-len(end) :])
    return f"model.{path}" if path[:1].isdigit() else path


def _blank(path: str) -> tuple[str, ...]:
    return tuple("#" if part.isdigit() else part for part in path.split("."))


def _ends(parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (parts[-length:] for length in range(1, len(parts) + 1))


def _op(target: object) -> str:
    """``_unsafe_view`` is a view as well: which of both torch traces depends on its version."""
    if not isinstance(target, OpOverload):
        return "item"
    name: str = target.overloadpacket.__name__
    return name.strip("_").removeprefix("unsafe_")


def _item(node: fx.Node) -> str:
    """The name of one of an op's results: in the op's schema, else in that of its backward, as ``rstd`` of a
    layer norm, else that of the op."""
    source, number = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(number, int)
    op = _op(source.target)
    schema = schema_of(source.target)
    if schema is not None and len(schema.returns) > 1 and schema.returns[number].name:
        return str(schema.returns[number].name)
    for reader, place in _readers(node):
        if _op(reader.target) == f"{op}_backward":
            return str(schema_of(reader.target).arguments[place].name)
    return re.sub("^native_|_backward$", "", op)


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """The ops that read a value, and as which of their arguments."""
    for user in node.users:
        if user.target in SAME_VALUE:
            yield from _readers(user)
        else:
            yield from ((user, place) for place, value in enumerate(user.args) if value is node)
