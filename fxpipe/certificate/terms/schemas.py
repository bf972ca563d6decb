"""What an op does by its schema: its functional form, its arguments, what it writes to and returns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from fxpipe.certificate.terms.terms import Term, canonical, operands

#: Views that are none by their schemas.
_SILENT_VIEWS = (
    "aten._unsafe_view",
    "aten._reshape_alias",
    "aten.unsafe_split",
    "aten.unsafe_split_with_sizes",
)
#: Python's numbers -> the dtype of the tensor that torch makes of them.
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
#: Arguments without which an op that may draw random numbers draws none.
_STILL = {"dropout_p": 0.0, "p": 0.0, "train": False}
#: Arguments that decide where and how a result lies in memory, not its elements: with these values they say
#: what an op does without them.
_OF_MEMORY = {"pin_memory": (None, False), "non_blocking": (None, False), "layout": (None, torch.strided)}


@dataclass(frozen=True, slots=True)
class Parameter:
    """``default``: ``...`` for none.  ``is_out``: it only says where the result goes.  ``is_tensor``: a
    number in its place is one.  ``is_plain``: it takes no tensors."""

    name: str
    default: object
    is_out: bool
    is_tensor: bool
    is_plain: bool
    is_keyword: bool


@dataclass(frozen=True, eq=False, slots=True)
class Schema:
    """``name``: of the functional form, "aten.add" of ``add_`` and ``add.out``.  ``written``: the arguments
    that it writes to.  ``viewed``: the argument whose memory it returns, if it does.  ``results``: 0 for
    none, 1 for a tensor, 2 for several.  ``may_draw``: random numbers.  ``is_elementwise``: each element of
    the result is made of those at the same place."""

    name: str
    parameters: tuple[Parameter, ...]
    written: tuple[str, ...]
    viewed: str | None
    results: int
    may_draw: bool
    is_elementwise: bool

    def bind(self, args: Any, kwargs: Any) -> dict[str, object]:
        """Name -> argument, without numbers that are the default.  Raises TypeError where torch would."""
        positional = [p for p in self.parameters if not p.is_keyword]
        if len(args) > len(positional):
            raise TypeError(f"{self.name} takes {len(positional)} arguments, not {len(args)}")
        bound = {p.name: value for p, value in zip(positional, args, strict=False)}
        known = {p.name for p in self.parameters}
        for name in kwargs:
            if name not in known or name in bound:
                raise TypeError(f"{self.name} takes no argument {name}, or has it already")
        bound.update(kwargs)
        for p in self.parameters:
            if p.default is ... and p.name not in bound:
                raise TypeError(f"{self.name} lacks the argument {p.name}")
            if type(bound.get(p.name)) in _NUMBERS and canonical(bound[p.name]) == p.default:
                del bound[p.name]
        return bound


def packet_name(name: str) -> str:
    """The name of an op without the underscore of its in-place form: ``add`` of ``add_``."""
    # ``__and__`` is the whole name of an op.
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@cache
def schema_of(op: Any) -> Schema:
    """The schema of an OpOverload."""
    schema, packet = op._schema, op.overloadpacket
    namespace, _, bare = schema.name.partition("::")
    writes = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    outs = {a.name for a in writes if a.kwarg_only}
    name = f"{namespace}.{packet_name(bare) if writes and not outs else bare}"
    parameters = tuple(
        Parameter(
            a.name,
            canonical(a.default_value) if a.has_default_value() else ...,
            a.name in outs or a.name == "memory_format",
            isinstance(a.type, torch.TensorType),
            "Tensor" not in str(a.type),
            a.kwarg_only,
        )
        for a in schema.arguments
    )
    returns_list = len(schema.returns) == 1 and not isinstance(schema.returns[0].type, torch.TensorType)
    return Schema(
        name,
        parameters,
        tuple(a.name for a in writes),
        _viewed(schema, name),
        2 if returns_list else len(schema.returns),
        torch.Tag.nondeterministic_seeded in op.tags,
        is_elementwise(f"{namespace}.{packet.__name__}"),
    )


@cache
def is_elementwise(name: str) -> bool:
    """Whether an op, by its functional name, has a form that makes each element of its result of those at the
    same place, to which it broadcasts its operands."""
    namespace, _, bare = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), bare, None) if bare else None
    overloads = () if packet is None else map(partial(getattr, packet), packet.overloads())
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _viewed(schema: Any, name: str) -> str | None:
    """The argument whose memory the results have, where the op does not write to it."""
    read = [r.alias_info for r in schema.returns if r.alias_info is not None and not r.alias_info.is_write]
    shared = {x for info in read for x in info.before_set}
    for argument in schema.arguments:
        info = argument.alias_info
        if info is None:
            continue
        # The views of a list are in no set of their own: their argument is in "*" after the op.
        if shared & set(info.before_set) or (read and "*" in info.after_set):
            return str(argument.name)
    return str(schema.arguments[0].name) if name in _SILENT_VIEWS else None


def draws(schema: Schema, args: dict[str, object]) -> bool:
    """Whether the op draws random numbers with these arguments."""
    if not schema.may_draw:
        return False
    values = {p.name: p.default for p in schema.parameters}
    values |= {name: canonical(args[name]) for name in _STILL if name in args}
    return not any(name in values and values[name] == canonical(still) for name, still in _STILL.items())


def arguments_of(schema: Schema, args: dict[str, object], as_tensor: Any) -> dict[str, object]:
    """The canonical arguments in the schema's order, without defaults and without those of memory.

    as_tensor: makes a term of a number that stands in the place of a tensor, of its dtype, and of whether no
        tensor is beside it.
    """
    arguments = {}
    is_alone = not any(isinstance(value, Term) for value in args.values())
    for p in schema.parameters:
        if p.is_out or p.name not in args:
            continue
        value = args[p.name]
        if p.name in _OF_MEMORY and value in _OF_MEMORY[p.name]:
            continue
        if p.is_tensor and type(value) in _NUMBERS:
            arguments[p.name] = as_tensor(value, _NUMBERS[type(value)], is_alone)
            continue
        value = canonical(value)
        if p.is_plain and any(True for _ in operands(value)):
            raise TypeError(f"{schema.name} takes no tensor for {p.name}")
        # torch takes None for a tensor, as in the backward of a fused attention without a mask.
        if p.is_tensor and value is not None and not isinstance(value, Term):
            raise TypeError(f"{schema.name} takes a tensor for {p.name}")
        if value != p.default:
            arguments[p.name] = value
    return arguments
