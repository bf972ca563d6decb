"""The messages of a program: the calls of ``rt`` in its ``step``, in order, as far as its text shows them."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import torch

from fxpipe.errors import RunError
from fxpipe.plan.program import records as r
from fxpipe.plan.program.performed import Performed
from fxpipe.plan.program.verbs import VERBS

#: The verbs by which ranks exchange messages.
_OF_MESSAGES = {name: verb for name, verb in VERBS.items() if verb.peer or verb.is_collective}


@dataclass(frozen=True)
class RuntimeCall:
    """A call of the method ``verb`` of ``rt``, with the names of the layouts of one message.

    ``peer``: the other rank, or the root of a collective; -1 for an all-gather.  ``group``: the number of a
    collective's communicator, else -1.
    """

    verb: str
    names: tuple[str, ...]
    peer: int
    group: int


@dataclass(frozen=True)
class ProgramTraffic:
    """The messages of one program.

    ``layouts``: message -> shape, strides and dtype as text.  ``calls``: in order; None if an edited ``step``
    does not show them, as calls in a loop or with a layout that is not in ``MESSAGES``.
    """

    layouts: dict[str, str]
    calls: tuple[RuntimeCall, ...] | None


def traffic(performed: Performed, messages: object) -> ProgramTraffic:
    """The messages of a program.  messages: its ``MESSAGES``.

    Raises RunError if they are not a dict of layouts.
    """
    if not isinstance(messages, dict):
        raise RunError(
            f"MESSAGES is a {type(messages).__name__} and must be a dict of layouts. "
            "Undo the edit, or save again."
        )
    layouts = {str(name): _layout(name, layout) for name, layout in messages.items()}
    calls = {
        id(value): call
        for value in performed.lines()
        if (call := _call(value)) and layouts.keys() >= set(call.names)
    }
    asked = [each.name for each in r.parts(performed.step) if isinstance(each, r.OfRuntime)]
    # Complete if ``calls`` has every call that sends or receives.
    if sum(name in _OF_MESSAGES for name in asked) != len(calls) or not performed.is_complete:
        return ProgramTraffic(layouts, None)
    return ProgramTraffic(
        layouts, tuple(calls[id(value)] for value, _ in performed.values() if id(value) in calls)
    )


def layouts_of_lengths(program: r.Program) -> dict[str, ast.expr]:
    """The layouts that the function ``messages`` gives, as expressions of lengths; none without it."""
    match program.functions.get("messages"):
        case r.Function(body=[*_, ast.Return(value=ast.Dict(keys=keys, values=values))]):
            pairs = zip(keys, values, strict=True)
            return {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
    return {}


def _layout(name: object, layout: object) -> str:
    match layout:
        case ast.Tuple(elts=[ast.Tuple(), ast.Tuple(), ast.expr() as dtype]):
            return " ".join([*map(ast.unparse, layout.elts[:2]), str(getattr(dtype, "value", None))])
        case (tuple() as shape, tuple() as stride, torch.dtype() as dtype):
            if all(type(n) is int for n in (*shape, *stride)):
                return f"{shape} {stride} {dtype}"
    raise RunError(
        f"MESSAGES[{name!r}] is {layout!r:.80} and must be a tuple of shape, strides and torch dtype. "
        "Undo the edit, or save again."
    )


def _call(value: ast.expr) -> RuntimeCall | None:
    """The call that an expression makes; None if its text does not show message, peer and group."""
    match value:
        case ast.Call(r.OfRuntime(name=name), arguments, named) if name in _OF_MESSAGES:
            verb = _OF_MESSAGES[name]
            lists = (each.elts if isinstance(each, ast.List) else [each] for each in arguments)
            items = (item for each in lists for item in each)
            names = tuple(text for item in items if (text := _message(item)))
            numbers = {
                str(each.arg): each.value.value
                for each in named
                if isinstance(each.value, ast.Constant) and type(each.value.value) is int
            }
            group = "group" if verb.is_collective else ""
            if names and numbers.keys() == {verb.peer, group} - {""}:
                return RuntimeCall(verb.name, names, numbers.get(verb.peer, -1), numbers.get(group, -1))
    return None


def _message(item: ast.expr) -> str:
    match item:
        case ast.Subscript(value=ast.Name(id="MESSAGES"), slice=ast.Constant(value=str(name))):
            return name
        case ast.Subscript(
            value=ast.Subscript(value=ast.Name(id="layouts"), slice=ast.Name()),
            slice=ast.Constant(value=str(name)),
        ):
            return name
    return ""
