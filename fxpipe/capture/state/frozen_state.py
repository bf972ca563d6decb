"""Warns of what a trace freezes: Python values, generators of random numbers, and a tensor's own class.

A program runs the ops that the forward ran in the trace.  Python state that the forward changes, as counters,
toggles and random draws, keeps the value of the trace.  Changes that can be detected give a warning that
names the line.  So do comparisons of a tensor's class, as the tensors of a trace are of a subclass:

type(x) is torch.Tensor        false in a trace
isinstance(x, torch.Tensor)    true
"""

from __future__ import annotations

import ast
import inspect
import random
import textwrap
import types
import warnings
from collections.abc import Collection, Iterable, Iterator
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from fxpipe.capture.reads.data_scalar import NumberOfData
from fxpipe.capture.state.recorded_state import RecordedState
from fxpipe.capture.state.state_slots import State
from fxpipe.python_state.objects import PLAIN, is_users

_CLASSES = ("Tensor", "Parameter")
_Expr = TypeVar("_Expr", bound=ast.expr)


class StateWatch:
    """Records state before a trace; ``warn_of_changes`` compares it after the trace, before the model is
    restored."""

    def __init__(self, recorded: RecordedState):
        self._recorded = recorded
        self._python, self._numpy = random.getstate(), _numpy_state()

    def warn_of_changes(self, difference: str, files: Collection[str], carried: Collection[int]) -> None:
        """difference: of a second run of the forward from the first, as a sentence.  files: with the lines
        that run the ops of the trace.  carried: the ids of tensors that programs put in their places."""
        warned = set()
        states = [(state, state.now()) for state in self._recorded.states]
        for (state, now), between in zip_longest(states, self._recorded.between):
            for key in _changed(state.before, between, now):
                called = state.called(key)
                if called not in warned:
                    warned.add(called)
                    _warn(f"The forward changes {called}{_line(*state.attribute(key))}.")
        for state, now in states:
            for key in _left(state, now, carried):
                called = state.called(key)
                if called not in warned:
                    warned.add(called)
                    place = _line(*state.attribute(key))
                    warnings.warn(
                        f"The forward leaves a tensor in {called}{place}. A program runs no Python of the "
                        "model: after a step it is what it was before. Let loss_fn return a metric as well, "
                        '(loss, {"name": tensor}), which pipe.step gives with outputs=["name"].',
                        stacklevel=2,
                    )
        if random.getstate() != self._python:
            _warn("The forward draws from Python's random numbers.")
        if _numpy_state() != self._numpy:
            _warn("The forward draws from numpy's random numbers.")
        if difference:
            _warn(f"{difference}.")
        if places := _compared_classes(self._recorded.objects.values(), files):
            warnings.warn(
                f"Code of the model compares type(…) with a tensor's class ({', '.join(places)}). "
                "In a trace tensors and parameters are of another class, so another branch may be traced "
                "than eager PyTorch takes: use isinstance.",
                stacklevel=2,
            )


def _numpy_state() -> tuple[bytes, int]:
    _, numbers, position, *_ = np.random.get_state(legacy=True)
    return np.asarray(numbers).tobytes(), int(position)


def warn_of_seed(source: str) -> None:
    _warn(f"The forward seeds torch's random numbers, before {source}.")


def _warn(what: str) -> None:
    warnings.warn(
        f"{what} A program holds no Python state: it runs every step as this one was traced. Keep the value "
        "in a buffer, draw random numbers from torch's default generator, or do it outside of the forward.",
        stacklevel=2,
    )


def _changed(before: Any, between: Any, now: Any) -> list[str]:
    """The keys of plain values that changed; between: the contents before a second run, None without one.

    A key that the first run made has changed if the second run gave it another value.
    """
    if isinstance(before, bytes):
        return [""] if now != before else []
    if not isinstance(before, dict):
        plain = before and all(isinstance(x, PLAIN) for x in (*now, *before))
        return [""] if plain and now != before else []
    changed = []
    for key, old in (before if between is None else between | before).items():
        new = now.get(key)
        if isinstance(old, PLAIN) and (
            isinstance(new, NumberOfData)
            or (isinstance(new, PLAIN) and old != new and (old == old or new == new))  # NaN is not itself
        ):
            changed.append(str(key))
    return changed


def _left(state: State, now: Any, carried: Collection[int]) -> list[str]:
    """The keys of places in which a script that looks there later would see a number, another tensor, or a
    shorter list, where eager PyTorch leaves tensors.

    None and a missing entry are left out: what a script does with these fails.
    """
    before = state.before
    if isinstance(state.owner.thing, nn.Module) and not is_users(type(state.owner.thing)):
        return []  # the weight that torch's hooks of norms make of others

    def is_new(value: object) -> bool:
        return isinstance(value, torch.Tensor) and id(value) not in carried

    if isinstance(before, list):
        return [""] if any(map(is_new, now[len(before) :])) else []
    if not isinstance(before, dict):
        return []
    values = ((key, old, now.get(key)) for key, old in before.items())
    numbers = (int, float, torch.Tensor)
    return [
        str(key) for key, old, new in values if new is not old and isinstance(old, numbers) and is_new(new)
    ]


def _line(module: nn.Module | None, attribute: str) -> str:
    """The line in which the module's class sets the attribute, as text; empty if it is not found."""
    if module is None:
        return ""
    for cls in type(module).__mro__:
        if cls is nn.Module or cls is object:
            continue
        for name, function in vars(cls).items():
            if name == "__init__" or not inspect.isfunction(function):
                continue
            for node, place in _located(function, ast.Attribute):
                if node.attr == attribute and isinstance(node.ctx, ast.Store):
                    return f" ({place})"
    return ""


def _located(function: types.FunctionType, kind: type[_Expr]) -> Iterator[tuple[_Expr, str]]:
    """The expressions of this kind in a function's source, each with its place, as file and line."""
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # made at run time, or a lambda within an expression
        return
    for node in ast.walk(tree):
        if isinstance(node, kind):
            yield node, f"{inspect.getsourcefile(function)}:{first + node.lineno - 1}"


def _compared_classes(reached: Iterable[object], files: Collection[str]) -> list[str]:
    """The places, as file and line, where functions compare the class of something with a tensor's.

    reached: what a model's code names, some of which it never runs.  files: those of the code that runs.
    """
    functions = [x for x in reached if isinstance(x, types.FunctionType) and x.__code__.co_filename in files]
    return sorted({place for x in functions for place in _comparisons(x)})


def _comparisons(function: types.FunctionType) -> Iterator[str]:
    # Most functions do not name both: their source is not read.
    names = {*_names(function.__code__)}
    if names.isdisjoint(_CLASSES) or names.isdisjoint(("type", "__class__")):
        return
    for node, place in _located(function, ast.Compare):
        sides = node.left, *node.comparators
        if any(map(_is_class, sides)) and any(map(_names_a_tensor, sides)):
            yield place


def _names(code: types.CodeType) -> Iterator[str]:
    """The names and the texts in a function, and in those within it."""
    yield from (*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars)
    todo = [*code.co_consts]
    while todo:
        constant = todo.pop()
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
        elif isinstance(constant, tuple | frozenset):
            todo += constant
        elif isinstance(constant, str):
            yield constant


def _is_class(node: ast.expr) -> bool:
    """``type(x)``, ``x.__class__``, or the name of one of them."""
    if isinstance(node, ast.Attribute) and node.attr in ("__name__", "__qualname__"):
        return _is_class(node.value)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1
    return isinstance(node, ast.Attribute) and node.attr == "__class__"


def _names_a_tensor(node: ast.expr) -> bool:
    """Whether an expression names a tensor's class, or, for ``in``, a tuple with one."""
    match node:
        case ast.Tuple(elts=several) | ast.List(elts=several) | ast.Set(elts=several):
            return any(map(_names_a_tensor, several))
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
            return name in _CLASSES
    return False
