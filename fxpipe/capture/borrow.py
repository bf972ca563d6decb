"""Lends the user's model to the trace: it has fake tensors during the trace and is restored afterwards.

A forward may write anything to its modules: it caches tables, counts calls, registers buffers, casts a layer.
During the trace those would be fake tensors.  So the contents of every attribute, container and plain object
that the model refers to are recorded before the trace and restored after it, also after an error.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from fxpipe.errors import CaptureError

_CONTAINERS = (dict, list, set, deque)
_VALUES = (str, bytes, int, float, complex, torch.Tensor, torch.dtype, torch.device, type(None))
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
#: Packages whose cached functions never hold tensors of a model.
_OTHERS = frozenset({*sys.stdlib_module_names, "torch", "sympy", "numpy", "fxpipe"})


@dataclass(eq=False)
class Snapshot:
    """The state that a model and its loss function refer to.

    ``states``: the contents of every ``__dict__`` and container below them.
    ``owners``: id of such a ``__dict__`` or container -> (the module it belongs to, the attribute's name).
    """

    states: list[tuple[Any, Any]] = field(default_factory=list)
    owners: dict[int, tuple[nn.Module, str]] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module, loss_fn: Any = None) -> Snapshot:
        snapshot, seen = Snapshot(), set[int]()
        todo: list[tuple[Any, nn.Module, str]] = [(x, model, "loss_fn") for x in _modules_of(loss_fn)]
        todo.append((model, model, ""))
        while todo:
            thing, owner, name = todo.pop()
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            if isinstance(thing, nn.Module):
                owner = thing
            contents = thing if isinstance(thing, (*_CONTAINERS, tuple)) else getattr(thing, "__dict__", None)
            if contents is None or not _is_walked(thing):
                continue
            if not isinstance(contents, tuple):
                snapshot.states.append((contents, _copied(contents)))
                snapshot.owners[id(contents)] = owner, name
            entries = contents.items() if isinstance(contents, dict) else ((name, x) for x in contents)
            direct = contents is owner.__dict__
            todo += [
                (x, owner, str(key) if direct else name) for key, x in entries if not isinstance(x, _VALUES)
            ]
        return snapshot

    def restore(self) -> None:
        for contents, before in self.states:
            _put_back(contents, before)


def _modules_of(function: Any) -> list[nn.Module]:
    """The modules of a loss function: itself, its object, or those in its closure."""
    found = [function, getattr(function, "__self__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            found.append(cell.cell_contents)
    return [x for x in found if isinstance(x, nn.Module)]


def _is_walked(thing: Any) -> bool:
    """Modules, containers, and objects of classes that are not torch's own (a cache, a configuration)."""
    if isinstance(thing, (nn.Module, *_CONTAINERS, tuple)):
        return True
    if isinstance(thing, (torch.Tensor, type, *_CODE)):
        return False
    return type(thing).__module__.partition(".")[0] not in ("torch", "builtins", "numpy")


def _copied(contents: Any) -> Any:
    # A subclass of dict or list may have a constructor and methods of its own: only its contents are kept.
    match contents:
        case dict():
            return dict(contents.items())
        case set():
            return set(contents)
        case _:
            return list(contents)


def _put_back(contents: Any, before: Any) -> None:
    match contents:
        case dict():
            if list(contents) != list(before):
                contents.clear()
                contents.update(before)
            for key, value in before.items():
                if contents[key] is not value:
                    contents[key] = value
        case set():
            if contents != before:
                contents.clear()
                contents |= before
        case _:
            if len(contents) != len(before) or any(a is not b for a, b in zip(contents, before, strict=True)):
                contents.clear()
                contents.extend(before)


def replace_tensors(snapshot: Snapshot, fakes: dict[int, torch.Tensor]) -> None:
    """Put fake tensors in the place of parameters and buffers, under each of their names and in containers.

    fakes: id of a parameter or buffer -> the fake tensor in its place.
    """
    for contents, before in snapshot.states:
        match contents:
            case dict():
                for key, value in before.items():
                    if id(value) in fakes:
                        contents[key] = fakes[id(value)]
            case list() | deque():
                for k, value in enumerate(before):
                    if id(value) in fakes:
                        contents[k] = fakes[id(value)]


def _convert(path: str, module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """``module.to(…)`` inside the forward: a no-op, or an error.

    nn.Module's own implementation replaces the tensors, which the trace could not follow.
    """
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        new = function(tensor)
        if (new.dtype, new.device) != (tensor.dtype, tensor.device):
            raise CaptureError(
                f"The forward converts the module {path!r} from {tensor.dtype} on {tensor.device} to "
                f"{new.dtype} on {new.device}. Convert it once, before you compile."
            )
    return module


def _convert_own(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """``module.to(…)`` of a module that the forward made; nn.Module's own swaps memory."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for key, parameter in module._parameters.items():
        if parameter is not None:
            converted = function(parameter.detach())
            module._parameters[key] = nn.Parameter(converted, parameter.requires_grad)
    for key, buffer in module._buffers.items():
        module._buffers[key] = None if buffer is None else function(buffer)
    return module


@contextlib.contextmanager
def borrowed(model: nn.Module, loss_fn: Any, fakes: dict[int, torch.Tensor]) -> Iterator[Snapshot]:
    """The model with fake tensors; on exit the model, the loss function, the caches of the functions that it
    called and the random number generators are restored."""
    snapshot = Snapshot.of(model, loss_fn)
    generators = random.getstate(), np.random.get_state()
    convert: Any = nn.Module._apply
    calls = [(f, f.cache_info().misses) for f in _cached_functions(model)]
    try:
        replace_tensors(snapshot, fakes)
        for path, module in model.named_modules():
            module.__dict__["_apply"] = partial(_convert, path, module)
        nn.Module._apply = _convert_own  # type: ignore[method-assign]
        with torch.random.fork_rng(devices=[]):
            yield snapshot
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]
        snapshot.restore()
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        for function, misses in calls:
            if function.cache_info().misses != misses:
                function.cache_clear()  # it may hold fake tensors


def _cached_functions(model: nn.Module) -> list[Any]:
    """The caches of ``functools.lru_cache`` in the packages of the model's classes."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    packages = {cls.__module__.partition(".")[0] for cls in classes} - _OTHERS
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages:
            values = list(getattr(module, "__dict__", {}).values())
            owned = [x for x in values if isinstance(x, type) and x.__module__ == name]
            values += [x for cls in owned for x in vars(cls).values()]
            found += [x for x in values if type(x) is functools._lru_cache_wrapper]
    return found
