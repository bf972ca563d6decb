"""Checks, before the first step, that the ranks' programs agree on the messages that they exchange.

Messages carry no headers, which would cost time in every step, and gloo and nccl do not compare sizes: they
deliver whatever bytes arrive, or end the process.  The messages of a program are found in its source: the
layouts in ``MESSAGES``, and the calls of ``rt`` in ``step``, in order.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from fxpipe.errors import RunError

_COLLECTIVES = ("broadcast", "gather", "all_gather")
_PEER = {"send": "to", "receive": "source", "gather": "to", "broadcast": "source"}
_VERBS = frozenset((*_PEER, *_COLLECTIVES))


@dataclass(frozen=True)
class Call:
    """A call of the method ``verb`` of ``rt``, with the names of the layouts of one message.

    ``peer``: the other rank, or the root of a collective; -1 for an all-gather.  ``group``: the number of a
    collective's communicator, else -1.
    """

    verb: str
    names: tuple[str, ...]
    peer: int
    group: int


@dataclass(frozen=True)
class Traffic:
    """The messages of one program.

    ``layouts``: message -> shape, strides and dtype as text.  ``calls``: in order; None if an edited ``step``
    does not show them, as calls in a loop or with a layout that is not in ``MESSAGES``.
    """

    layouts: dict[str, str]
    calls: tuple[Call, ...] | None


def traffic(tree: ast.Module, namespace: Mapping[str, Any]) -> Traffic:
    """The messages of a program.  Raises RunError if ``MESSAGES`` is not a dict of layouts."""
    messages = namespace.get("MESSAGES", {})
    if not isinstance(messages, dict):
        raise RunError(
            f"MESSAGES is a {type(messages).__name__} and must be a dict of layouts. "
            "Undo the edit, or save again."
        )
    layouts = {str(name): _layout(name, given) for name, given in messages.items()}
    step = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "step"][-1]
    values = [n.value for n in step.body if isinstance(n, ast.Expr | ast.Assign)]
    found = [call for value in values if (call := _call(value)) and layouts.keys() >= set(call.names)]
    nodes = list(ast.walk(step))
    names = [node for node in nodes if isinstance(node, ast.Name) and node.id == "rt"]
    asked = [name for node in nodes if (name := _attribute_of_rt(node))]
    # Complete if ``rt`` is used for attributes only, and ``found`` has every call that sends or receives.
    plain = len(asked) == len(names) and step.args.args[:1] and step.args.args[0].arg == "rt"
    complete = sum(attribute in _VERBS or attribute == "comm" for attribute in asked) == len(found)
    return Traffic(layouts, tuple(found) if plain and complete else None)


def check_agreement(ranks: Sequence[Traffic]) -> None:
    """Raise RunError, naming the message, both ranks and both layouts, if the programs do not agree."""
    _check_layouts(ranks)
    known = {rank: own.calls for rank, own in enumerate(ranks) if own.calls is not None}
    channels: defaultdict[tuple[int, int], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    groups: defaultdict[int, dict[int, list[str]]] = defaultdict(lambda: {rank: [] for rank in known})
    for rank, calls in known.items():
        for call in calls:
            if call.group >= 0:
                groups[call.group][rank].append(_joined(call, ranks[rank]))
            elif call.peer in known:
                way = (rank, call.peer) if call.verb == "send" else (call.peer, rank)
                channels[way][call.verb == "receive"].extend(_described(call, ranks[rank]))
    for (source, target), (sent, expected) in channels.items():
        _check_order(
            f"Message {{}} of a step from rank {source} to rank {target}", source, sent, target, expected
        )
    for group, joined in groups.items():
        first, *others = joined
        for rank in others:
            _check_order(
                f"Collective {{}} of a step in group {group}", first, joined[first], rank, joined[rank]
            )


def _check_order(what: str, rank: int, own: list[str], other: int, theirs: list[str]) -> None:
    for k, (a, b) in enumerate(zip_longest(own, theirs, fillvalue="none")):
        if a != b:
            raise RunError(
                f"{what.format(k)} is {a} in the program of rank {rank}, and {b} in that of rank {other}. "
                "Edit both programs alike."
            )


def _check_layouts(ranks: Sequence[Traffic]) -> None:
    first: dict[str, tuple[int, str]] = {}
    for rank, own in enumerate(ranks):
        for name, layout in own.layouts.items():
            other, known = first.setdefault(name, (rank, layout))
            if known != layout:
                raise RunError(
                    f"Message {name!r} is {known} in the program of rank {other}, and {layout} in that of "
                    f"rank {rank} (shape, strides, dtype). Edit MESSAGES alike in both programs."
                )


def _joined(call: Call, own: Traffic) -> str:
    """A collective as text, without its name for gathers, whose names differ between the ranks."""
    named = f" {call.names[0]!r}" if call.verb == "broadcast" else ""
    peer = f" of rank {call.peer}" if call.peer >= 0 else ""
    return f"a {call.verb.replace('_', '-')}{peer}{named}, {own.layouts[call.names[0]]}"


def _described(call: Call, own: Traffic) -> list[str]:
    """The values of a message; the other rank may send or receive them in other groups."""
    return [f"{name!r}, {own.layouts[name]}," for name in call.names]


def _layout(name: Any, given: Any) -> str:
    match given:
        case (tuple() as shape, tuple() as stride, torch.dtype() as dtype):
            if all(type(n) is int for n in (*shape, *stride)):
                return f"{shape} {stride} {dtype}"
    raise RunError(
        f"MESSAGES[{name!r}] is {given!r:.80} and must be a tuple of shape, strides and torch dtype. "
        "Undo the edit, or save again."
    )


def _attribute_of_rt(node: ast.AST) -> str:
    match node:
        case ast.Attribute(value=ast.Name(id="rt"), attr=name):
            return name
    return ""


def _call(node: ast.AST) -> Call | None:
    """The call that an expression makes; None if its text does not show message, peer and group."""
    verb = _attribute_of_rt(node.func) if isinstance(node, ast.Call) else ""
    if not (isinstance(node, ast.Call) and verb in _VERBS):
        return None
    names: list[str] = []
    for argument in node.args:
        for item in argument.elts if isinstance(argument, ast.List) else [argument]:
            match item:
                case ast.Subscript(value=ast.Name(id="MESSAGES"), slice=ast.Constant(value=str(name))):
                    names.append(name)
    numbers = {
        k.arg: k.value.value
        for k in node.keywords
        if isinstance(k.value, ast.Constant) and type(k.value.value) is int
    }
    wanted = {_PEER[verb]} if verb in _PEER else set()
    wanted |= {"group"} if verb in _COLLECTIVES else set()
    if not names or numbers.keys() != wanted:
        return None
    return Call(verb, tuple(names), numbers.get(_PEER.get(verb, ""), -1), numbers.get("group", -1))
