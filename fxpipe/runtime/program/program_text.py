"""The text of a program: the ops and the messages of its ``step``, in order, as far as it shows them.

A function of ``step``, as ``F1`` for the ops F1.0, F1.1, …, is called in lines of its own, with numbers.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fxpipe.errors import RunError

_COLLECTIVES = ("broadcast", "gather", "all_gather", "reduce")
_PEER = {"send": "to", "receive": "source", "gather": "to", "reduce": "to", "broadcast": "source"}
_VERBS = frozenset((*_PEER, *_COLLECTIVES))


@dataclass(frozen=True, eq=False)
class StepText:
    step: ast.FunctionDef

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        return {n.name: n for n in self.step.body if isinstance(n, ast.FunctionDef)}

    @property
    def has_warm_up(self) -> bool:
        """Whether it begins with the loop in which a rank runs ahead of the verdict on the last update."""
        return any(isinstance(n, ast.For) and _is_warm_up(n.iter) for n in self.step.body)

    def values(self) -> Iterator[tuple[ast.expr, Mapping[str, object]]]:
        """What is computed, in order, with the arguments of the function around."""
        for value in _values(self.step.body):
            yield value, {}
            given = self._call(value)
            if given is not None:
                function, arguments = given
                for inner in _values(function.body):
                    yield inner, arguments

    def shown(self) -> list[ast.expr]:
        """What is computed in lines of ``step`` and of its functions, each line once."""
        return [v for body in (self.step, *self.functions.values()) for v in _values(body.body)]

    @property
    def is_complete(self) -> bool:
        """Whether the functions of ``step`` are called in lines of their own alone, and run to their ends."""
        calls = [given[0].name for v in _values(self.step.body) if (given := self._call(v)) is not None]
        nodes = list(ast.walk(self.step))
        named = [n.id for n in nodes if isinstance(n, ast.Name) and n.id in self.functions]
        defined = Counter(n.name for n in nodes if isinstance(n, ast.FunctionDef))
        ends = [n for f in self.functions.values() for n in ast.walk(f) if isinstance(n, ast.Return)]
        return Counter(calls) == Counter(named) and not ends and all(defined[f] == 1 for f in self.functions)

    def _call(self, value: ast.expr) -> tuple[ast.FunctionDef, dict[str, object]] | None:
        """The function of ``step`` that is called, with its arguments, if they are constants."""
        match value:
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in self.functions:
                function = self.functions[name]
                names = [argument.arg for argument in function.args.args]
                numbers = [argument.value for argument in args if isinstance(argument, ast.Constant)]
                if len(numbers) == len(args) == len(names):
                    return function, dict(zip(names, numbers, strict=True))
        return None


def text_of(value: ast.expr, arguments: Mapping[str, object]) -> str | None:
    """The text that a literal, or an f-string of arguments, is; None for any other expression."""
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            texts = [text_of(part, arguments) for part in parts]
            return None if None in texts else "".join(map(str, texts))
        case ast.FormattedValue(value=ast.Name(id=name), conversion=-1, format_spec=None) if (
            name in arguments
        ):
            return str(arguments[name])
    return None


def _values(body: Sequence[ast.stmt]) -> Iterator[ast.expr]:
    for statement in body:
        match statement:
            case ast.Expr(value=value) | ast.Assign(value=value):
                yield value
            case ast.For(iter=loop, body=inner) if _is_warm_up(loop):
                yield from _values(inner)


def _is_warm_up(loop: ast.expr) -> bool:
    """Whether a loop runs once: a second time it does all of it again."""
    return isinstance(loop, ast.Call) and _attribute_of_rt(loop.func) == "warm_up"


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


def traffic(tree: ast.Module, namespace: Mapping[str, Any]) -> ProgramTraffic:
    """The messages of a program.  Raises RunError if ``MESSAGES`` is not a dict of layouts."""
    messages = namespace.get("MESSAGES", {})
    if not isinstance(messages, dict):
        raise RunError(
            f"MESSAGES is a {type(messages).__name__} and must be a dict of layouts. "
            "Undo the edit, or save again."
        )
    layouts = {str(name): _layout(name, given) for name, given in messages.items()}
    step = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "step"][-1]
    text = StepText(step)
    found = {id(v): call for v in text.shown() if (call := _call(v)) and layouts.keys() >= set(call.names)}
    nodes = list(ast.walk(step))
    names = [node for node in nodes if isinstance(node, ast.Name) and node.id == "rt"]
    asked = [name for node in nodes if (name := _attribute_of_rt(node))]
    # Complete if ``rt`` is used for attributes only, and ``found`` has every call that sends or receives.
    plain = len(asked) == len(names) and step.args.args[:1] and step.args.args[0].arg == "rt"
    complete = sum(attribute in _VERBS or attribute == "comm" for attribute in asked) == len(found)
    if not (plain and complete and text.is_complete):
        return ProgramTraffic(layouts, None)
    return ProgramTraffic(
        layouts, tuple(found[id(value)] for value, _ in text.values() if id(value) in found)
    )


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


def _call(node: ast.AST) -> RuntimeCall | None:
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
    return RuntimeCall(verb, tuple(names), numbers.get(_PEER.get(verb, ""), -1), numbers.get("group", -1))
