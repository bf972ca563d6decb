"""Keeps what modules return in the forward, for outputs that are named after them: ``blocks.3``.

``blocks.3.0`` is the first tensor of a tuple, and ``norm#1`` what the second call of a module returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fxpipe.capture.lanes.dtensors import whole
from fxpipe.capture.output_names import OUTPUT, listed, named_tensors
from fxpipe.errors import CaptureError


@dataclass(frozen=True)
class _Place:
    """A tensor that a module returns.  ``call``: the number of the module's call; None if it is the only one.
    ``item``: of its result."""

    path: str
    call: int | None
    item: str


@dataclass(frozen=True, eq=False)
class _Result:
    """The result of one call of a module.  ``tensors``: copies by their names in the result."""

    kind: str
    tensors: dict[str, torch.Tensor]


@dataclass(eq=False)
class Activations:
    """The results of modules that are asked for by name.  ``asked``: names, some of modules."""

    model: nn.Module
    asked: Sequence[str]
    _results: dict[str, list[_Result]] = field(default_factory=dict)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """While entered, keeps what these modules return."""
        modules = self.modules
        paths = {place.path for name in self.asked if (place := _place(name, modules)) is not None}
        self._results = {path: [] for path in paths}
        handles = [modules[path].register_forward_hook(_keeping(self._results[path])) for path in paths]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules by path, each under all of its paths."""
        return {path: x for path, x in self.model.named_modules(remove_duplicate=False) if path}

    def find(self, name: str) -> torch.Tensor | None:
        """The output with this name; None if no module has it.

        Raises CaptureError where it is not one tensor.
        """
        place = _place(name, self.modules)
        if place is None:
            return None
        result = self._call(place)
        tensors = result.tensors
        if (tensor := tensors.get(place.item or OUTPUT)) is not None:
            return tensor
        if place.item:
            what = f"has no {place.item!r} in what it returns"
        else:
            what = f"returns {result.kind}, and an output is one tensor"
        names = [f"{name.removesuffix(place.item).rstrip('.')}.{item}" for item in tensors if item != OUTPUT]
        remedy = f"Name one of {listed(map(repr, names))}" if names else "Name a module within it"
        raise CaptureError(f"The module {place.path!r} {what}. {remedy}.")

    def _call(self, place: _Place) -> _Result:
        calls = self._results[place.path]
        if not calls and place.item and any(True for _ in self.modules[place.path].children()):
            within = [name for name, _ in self.modules[place.path].named_children()]
            raise CaptureError(
                f"There is no module {place.path + '.' + place.item!r}: {place.path!r} has "
                f"{listed(map(repr, within))}."
            )
        if not calls:
            raise CaptureError(
                f"The module {place.path!r} is not called in the forward, so it gives no output. Name one "
                "that is: the forward may call a module within it, or its functions and weights alone."
            )
        if place.call is None and len(calls) == 1:
            return calls[0]
        if place.call is None or place.call >= len(calls):
            names = listed(repr(f"{place.path}#{k}") for k in range(len(calls)))
            times = "once" if len(calls) == 1 else f"{len(calls)} times"
            raise CaptureError(
                f"The module {place.path!r} is called {times} in a forward: name the call, {names}."
            )
        return calls[place.call]


def _keeping(results: list[_Result]) -> Callable[[nn.Module, object, object], None]:
    def keep(module: nn.Module, args: object, returned: object) -> None:
        copies = {name: _copy(x) for name, x in named_tensors(returned)}
        results.append(_Result("None" if returned is None else f"a {type(returned).__name__}", copies))

    return keep


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of what the module returned, as later ops may write to it.  Capture leaves it out again."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor  # which is refused as an output
    copied: torch.Tensor = torch.ops.aten.lift_fresh_copy(whole(tensor.detach()))
    return copied


def _place(name: str, modules: dict[str, nn.Module]) -> _Place | None:
    """The longest path of a module that the name begins with, and what follows."""
    front, item = name, ""
    while front:
        path, _, call = front.partition("#")
        if path in modules and (call.isdigit() or "#" not in front):
            return _Place(path, int(call) if call else None, item)
        front, _, last = front.rpartition(".")
        item = f"{last}.{item}" if item else last
    return None
