"""Warns of state that a trace freezes: Python values, and generators of random numbers.

A program runs the ops that the forward ran in the trace.  Python state that the forward changes, as counters,
toggles and random draws, keeps the value of the trace.  Changes that can be detected give a warning that
names the line.
"""

from __future__ import annotations

import ast
import inspect
import random
import textwrap
import warnings
from collections.abc import Collection
from itertools import zip_longest
from typing import Any

import numpy as np
from torch import nn

from fxpipe.capture.reads.data_scalar import NumberOfData
from fxpipe.capture.reads.tensor_classes import compared_classes
from fxpipe.capture.state.recorded_state import RecordedState
from fxpipe.capture.state.state_slots import State
from fxpipe.python_state.objects import PLAIN


class StateWatch:
    """Records state before a trace; ``warn_of_changes`` compares it after the trace, before the model is
    restored."""

    def __init__(self, recorded: RecordedState):
        self._recorded = recorded
        self._python, self._numpy = random.getstate(), _numpy_state()

    def warn_of_changes(self, difference: str, files: Collection[str]) -> None:
        """difference: of a second run of the forward from the first, as a sentence.  files: with the lines
        that run the ops of the trace."""
        warned = set()
        states = self._recorded.states
        for state, between in zip_longest(states, self._recorded.between):
            for key in _changed(state, between):
                called = state.called(key)
                if called not in warned:
                    warned.add(called)
                    _warn(f"The forward changes {called}{_line(*state.attribute(key))}.")
        if random.getstate() != self._python:
            _warn("The forward draws from Python's random numbers.")
        if _numpy_state() != self._numpy:
            _warn("The forward draws from numpy's random numbers.")
        if difference:
            _warn(f"{difference}.")
        if places := compared_classes(self._recorded.objects.values(), files):
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


def _changed(state: State, between: Any) -> list[str]:
    """The keys of plain values that changed; between: the contents before a second run, None without one.

    A key that the first run made has changed if the second run gave it another value.
    """
    before, now = state.before, state.now()
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
            try:
                lines, first = inspect.getsourcelines(function)
            except (OSError, TypeError):
                continue
            for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))):
                if (
                    isinstance(node, ast.Attribute)
                    and node.attr == attribute
                    and isinstance(node.ctx, ast.Store)
                ):
                    return f" ({inspect.getsourcefile(function)}:{first + node.lineno - 1})"
    return ""
