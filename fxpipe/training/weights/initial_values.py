"""Initial values for tensors of a model on the meta device, the same whichever of them a process makes.

The functions that initialize a model run on all of its modules, while the wanted tensors alone have memory:
ops on the others, on the meta device, take no time.  Each random op draws by a key of its own, made of the
seed, the function, the module's path, the last tensor of the model that an op was given, and the number of
the op since.  So what an op draws does not depend on which other tensors have memory: functions such as
``trunc_normal_`` draw as often as the values need, and not at all where there are none.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fxpipe.errors import RunError
from fxpipe.plan.dtensors import shape_of
from fxpipe.plan.number import number
from fxpipe.runtime.job.failure import in_short
from fxpipe.runtime.program.random import keyed
from fxpipe.runtime.torch_private import TorchDispatchMode, schema_of, tensors_by_kind
from fxpipe.runtime.torch_private import storage_number as _storage

Initialize = Callable[[nn.Module], object]
RESETS = ("reset_parameters", "_reset_parameters")
"""The methods by which modules of torch initialize themselves."""


def initialize(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], seed: int = 0, function: Initialize | None = None
) -> set[str]:
    """Overwrite tensors with the initial values of the model's parameters and buffers of these names.

    As where a model is made: modules reset themselves, then ``_init_weights`` of the module or of the nearest
    one around it is called (the protocol of Hugging Face), then ``function``, as by ``model.apply``.  A
    tensor with two names is given to the module with its first name alone.  The model is not changed.
    Returns the names of those that were written.  Raises RunError, naming the module, where a function fails.
    """
    written: set[int] = set()
    with _with_tensors(model, tensors) as names, torch.no_grad():
        for kind, path, module, call in _calls(model, function):
            with _naming(kind, path, module), _Initializing(f"{seed} {kind} {path}", names, written):
                call()
        values = {name: _tensor(model, name) for name in tensors}
        for name, value in values.items():  # where a function has put a tensor of its own
            if value is not None and not value.is_meta and _storage(value) != _storage(tensors[name]):
                tensors[name].copy_(value)
                written.add(_storage(tensors[name]))
    return {name for name, tensor in tensors.items() if _storage(tensor) in written or not tensor.numel()}


class _Initializing(TorchDispatchMode):
    """Keys the random ops of one call, and records the storages that its ops write to."""

    def __init__(self, call: str, names: Mapping[int, str], written: set[int]) -> None:
        """names: storage -> the tensor of the model that has it."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._call, self._names, self._written = call, names, written
        self._last, self._drawn = "", Counter[str]()

    def __torch_dispatch__(
        self, op: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        schema = schema_of(op).arguments
        arguments = {a.name: x for a, x in zip(schema, args, strict=False)} | (kwargs or {})
        storages = {name: _storage(t) for name, t in arguments.items() if isinstance(t, torch.Tensor)}
        changed = [a.name for a in schema if a.alias_info and a.alias_info.is_write]
        self._written |= {storages[name] for name in changed if name in storages}
        for storage in reversed(storages.values()):  # an op writes to its first
            self._last = self._names.get(storage, self._last)
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return op(*args, **(kwargs or {}))
        if arguments.get("generator") is not None:
            raise RunError(
                f"{op} draws from a generator of its own, whose numbers would depend on the tensors that "
                "this rank holds. Leave out generator=."
            )
        self._drawn[self._last] += 1
        key = number(f"{self._call} {self._last}".encode())
        return keyed(key, self._drawn[self._last], op, *args, **(kwargs or {}))


def _calls(
    model: nn.Module, function: Initialize | None
) -> Iterator[tuple[str, str, nn.Module, Callable[[], object]]]:
    """The calls in order: the function's name, the module's path, the module."""
    modules = list(_inside_out(model, "", None, set()))
    for path, module, _ in modules:
        for name in RESETS:
            if callable(reset := getattr(module, name, None)):
                yield f"{name}()", path, module, reset
    for path, module, around in modules:
        if around is not None:
            yield "_init_weights", path, module, partial(around, module)
    if function is not None:
        for path, module, _ in modules:
            yield getattr(function, "__name__", "fn"), path, module, partial(function, module)


def _inside_out(
    module: nn.Module, path: str, around: Initialize | None, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, Initialize | None]]:
    """Yield each module once, behind those that it holds, with the ``_init_weights`` responsible for it."""
    if module in seen:
        return
    seen.add(module)
    if _takes_a_module(mine := getattr(module, "_init_weights", None)):
        around = mine
    for name, child in module.named_children():
        yield from _inside_out(child, f"{path}.{name}" if path else name, around, seen)
    yield path, module, around


def _takes_a_module(function: object) -> bool:
    """Some models have an ``_init_weights()`` of another kind, without arguments."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(nn.Identity())
    except TypeError:
        return False
    return True


@contextlib.contextmanager
def _naming(kind: str, path: str, module: nn.Module) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the model's own code may raise anything
        where = f"the module {path}" if path else "the model"
        raise RunError(
            f"{kind} of {where} ({type(module).__name__}) failed: {in_short(error)} Only tensors that this "
            "rank holds have values here, and none can be made from the values of another one's."
        ) from error


@contextlib.contextmanager
def _with_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[int, str]]:
    """Give the model these tensors by their names for a block, and in all other places ones without values.

    Yields the names of all by their storages.
    """
    before = [(slots, dict(slots)) for m in model.modules() for slots in tensors_by_kind(m)]
    names: dict[int, str] = {}
    made = []  # which keeps the storages apart, also of those that a function replaces
    try:
        for path, module in model.named_modules():
            for slots in tensors_by_kind(module):
                for short, tensor in slots.items():
                    if tensor is not None:
                        name = f"{path}.{short}" if path else short
                        made.append(_like(tensor, tensors.get(name), shape_of(module, short)))
                        slots[short] = made[-1]
                        names[_storage(made[-1])] = name
        yield names
    finally:  # the model keeps its own tensors, which lists of the script may hold
        for slots, entries in before:
            slots.clear()
            slots |= entries


def _like(old: torch.Tensor, value: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """``value``, or a tensor without values, with the marks that code has put on the old one."""
    new = torch.empty(shape, dtype=old.dtype, device="meta") if value is None else value
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def _tensor(model: nn.Module, name: str) -> torch.Tensor | None:
    path, _, short = name.rpartition(".")
    module = model.get_submodule(path)
    parameters, buffers = tensors_by_kind(module)
    tensor = parameters.get(short, buffers.get(short))
    return None if tensor is None else tensor.detach()
