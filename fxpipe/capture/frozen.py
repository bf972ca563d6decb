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
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from fxpipe.capture.borrow import Snapshot

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Watch:
    """Records state before a trace; ``warn_of_changes`` compares it after the trace, before the model is
    restored."""

    def __init__(self, model: nn.Module, snapshot: Snapshot):
        self._model, self._snapshot = model, snapshot
        self._python, self._numpy = random.getstate(), _numpy_state()
        self._kept: list[tuple[nn.Module, str]] = []

    def warn_of_changes(self, difference: str) -> None:
        """difference: of a second run of the forward from the first, as a sentence."""
        paths = {id(module): path for path, module in self._model.named_modules()}
        warned = set()
        for contents, before in self._snapshot.states:
            owner, name = self._snapshot.owners[id(contents)]
            for key in _changed(contents, before):
                place = key if contents is owner.__dict__ else name  # whose keys are attributes
                if place and (id(owner), place) not in warned:
                    warned.add((id(owner), place))
                    called = _called(paths.get(id(owner), ""), place)
                    _warn(f"The forward changes {called}{_line(owner, place)}.")
        if random.getstate() != self._python:
            _warn("The forward draws from Python's random numbers.")
        if _numpy_state() != self._numpy:
            _warn("The forward draws from numpy's random numbers.")
        if difference:
            _warn(f"{difference}.")


def tensors_by_name(model: nn.Module, loss_fn: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that a model and its loss function refer to now, with their names for messages."""
    snapshot, paths = (
        Snapshot.of(model, loss_fn),
        {id(module): path for path, module in model.named_modules()},
    )
    for contents, values in snapshot.states:
        owner, name = snapshot.owners[id(contents)]
        for key, x in values.items() if isinstance(values, dict) else ((name, x) for x in values):
            if isinstance(x, torch.Tensor):
                own = contents is owner.__dict__ or name in ("_parameters", "_buffers")
                yield _called(paths.get(id(owner), ""), str(key) if own else name), x


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


def _changed(contents: Any, before: Any) -> list[str]:
    """The keys of plain values that changed."""
    if not isinstance(contents, dict):
        plain = before and all(isinstance(x, _PLAIN) for x in (*contents, *before))
        return [""] if plain and type(before)(contents) != before else []
    changed = []
    for key, old in before.items():
        new = contents.get(key)
        if isinstance(old, _PLAIN) and isinstance(new, _PLAIN) and old != new:
            changed.append(str(key))
    return changed


def _called(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else f"the model's {attribute}"


def _line(module: nn.Module, attribute: str) -> str:
    """The line in which the module's class sets the attribute, as text; empty if it is not found."""
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
