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
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from fxpipe.capture.borrow import Snapshot
from fxpipe.capture.number import NumberOfData
from fxpipe.errors import CaptureError
from fxpipe.ir import compat

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Watch:
    """Records state before a trace; ``warn_of_changes`` compares it after the trace, before the model is
    restored."""

    def __init__(self, model: nn.Module, snapshot: Snapshot):
        self._model, self._snapshot = model, snapshot
        self._python, self._numpy = random.getstate(), _numpy_state()
        self._kept: list[tuple[nn.Module, str]] = []

    def note_kept(self, sources: Sequence[bool]) -> None:
        """Find attributes that were None and now hold what the running trace computed; called at its end.

        sources: of each input of the trace, whether it changes from step to step.
        """
        found = [
            (self._snapshot.owners[id(contents)][0], str(key), node)
            for contents, before in self._snapshot.states
            if isinstance(contents, dict) and contents is self._snapshot.owners[id(contents)][0].__dict__
            for key, new in contents.items()
            if isinstance(new, torch.Tensor) and before.get(key) is None
            if (node := compat.traced_node(new)) is not None
        ]
        if found:
            changing = _computed_from(sources)
            self._kept = [(owner, name) for owner, name, node in found if node in changing]

    def warn_of_changes(self, read: set[int]) -> None:
        """read: ids of the tensors that the graph holds as constants.

        Raises CaptureError if the forward reads a tensor that is not a buffer and replaces it.
        """
        paths = {id(module): path for path, module in self._model.named_modules()}
        warned = set()
        for contents, before in self._snapshot.states:
            owner, name = self._snapshot.owners[id(contents)]
            direct = contents is owner.__dict__  # its keys are attributes
            path = paths.get(id(owner), "")
            for key in _replaced(contents, before, read):
                place = key if direct else name
                raise CaptureError(
                    f"The forward reads the tensor {_called(path, place)} and puts another in its place"
                    f"{_line(owner, place)}. A program cannot carry it from step to step: make it a buffer."
                )
            for key in _changed(contents, before):
                place = key if direct else name
                if place and (id(owner), place) not in warned:
                    warned.add((id(owner), place))
                    _warn(f"The forward changes {_called(path, place)}{_line(owner, place)}.")
        for owner, name in self._kept:
            if _is_read(owner, name):
                what = f"The forward keeps a result in {_called(paths.get(id(owner), ''), name)}"
                _warn(f"{what}{_line(owner, name)}, which it reads in later steps.")
        if random.getstate() != self._python:
            _warn("The forward draws from Python's random numbers.")
        if _numpy_state() != self._numpy:
            _warn("The forward draws from numpy's random numbers.")


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
        if isinstance(old, _PLAIN) and (
            isinstance(new, NumberOfData) or (isinstance(new, _PLAIN) and old != new)
        ):
            changed.append(str(key))
    return changed


def _replaced(contents: Any, before: Any, read: set[int]) -> list[str]:
    """The keys of tensors that the graph holds as constants and that were replaced."""
    if not isinstance(contents, dict):
        return []
    return [str(key) for key, old in before.items() if id(old) in read and contents.get(key) is not old]


def _computed_from(sources: Sequence[bool]) -> set[fx.Node]:
    """The nodes of the running trace that depend on one of these inputs."""
    graph, found = compat.traced_graph(), set[fx.Node]()
    inputs = dict(zip(graph.find_nodes(op="placeholder"), sources, strict=False))
    for node in graph.nodes:
        if inputs.get(node) or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _called(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else f"the model's {attribute}"


def _line(module: nn.Module, attribute: str) -> str:
    """The line in which the module's class sets the attribute, as text; empty if it is not found."""
    return next((line for node, line in _uses(module, attribute) if isinstance(node.ctx, ast.Store)), "")


def _is_read(module: nn.Module, attribute: str) -> bool:
    """Whether a function of the module's class reads the attribute."""
    return any(isinstance(node.ctx, ast.Load) for node, _ in _uses(module, attribute))


def _uses(module: nn.Module, attribute: str) -> Iterator[tuple[ast.Attribute, str]]:
    """Where the functions of the module's class read and set the attribute, each with its line as text."""
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
                if isinstance(node, ast.Attribute) and node.attr == attribute:
                    yield node, f" ({inspect.getsourcefile(function)}:{first + node.lineno - 1})"
