"""The settings in one owner (``Reached``) or class, and whether it holds the same objects as before.

In nearly all steps all owners do, which the addresses of the objects tell in a microsecond an owner.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fxpipe.runtime.functions import name_and_line
from fxpipe.training.guards.reachable import (
    CONTAINERS,
    OF_MODULES,
    function_of,
    has_attributes,
    is_plain,
    own,
)

#: Larger arrays are not compared, and of larger tensors the version alone.
_LARGEST_ARRAY = 1 << 16
#: What can change without another object in its place, and holds no other objects.
_BY_VALUE = (set, bytearray, torch.Tensor, np.ndarray)


class Code(NamedTuple):
    """A function or a class, by its name and line.  It is not kept: it may hold the model."""

    text: str
    ref: Any

    def __repr__(self) -> str:
        return self.text


class Numbers(NamedTuple):
    """A tensor that is a constant of the program, how often it was written, and its bytes if they are few; or
    the bytes of an array."""

    kind: str
    ref: Any
    contents: Any

    def __repr__(self) -> str:
        return f"{self.kind} with other values"


@dataclass(frozen=True)
class Compared:
    """What is compared.  ``reads``: the names that functions read.  ``sets``: those that they set, which are
    not.  ``constants``: tensors whose values programs hold, by id."""

    reads: Collection[str]
    sets: Collection[str]
    constants: Mapping[int, weakref.ref[torch.Tensor]]

    def value(self, x: Any) -> Any:
        """What stands for it in comparisons; None for what is not compared."""
        if is_plain(x):
            return x
        if isinstance(x, set | frozenset):
            return frozenset(x) if all(map(is_plain, x)) else None
        if isinstance(x, bytearray):
            return bytes(x) if len(x) <= _LARGEST_ARRAY else None
        if isinstance(x, types.CodeType):
            return Code(f"{x.co_name} ({Path(x.co_filename).name}:{x.co_firstlineno})", _weak(x))
        ref = self.constants.get(id(x))  # another one may have the address of one that is gone
        if isinstance(x, torch.Tensor) and ref is not None and ref() is x and not x.is_inference():
            return Numbers("a tensor", ref, (x._version, _contents_of(x)))
        if isinstance(x, np.ndarray) and x.nbytes <= _LARGEST_ARRAY and not x.dtype.hasobject:
            return Numbers("an array", None, x.tobytes())
        function = function_of(x)
        is_code = callable(function) and not isinstance(x, (nn.Module, torch.Tensor))
        return code(function) if is_code else None


@dataclass(eq=False)
class Place:
    """``path``: of the owner, or the name of a class.  ``is_far``: whether only names that functions read
    count.  ``values``: by name, those that are compared.  The owner is not kept."""

    path: str
    owner: Any
    is_far: bool
    compared: Compared
    values: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        owner, constants = self.owner, self.compared.constants
        self.owner, self._type = _weak(owner), type(owner)
        self._names: list[Any] = []
        self._objects: dict[Any, Any] = {}  # whose contents count as well
        self._by_value: list[tuple[Any, Any]] = []
        self._modules: list[int] = []
        self._constants: list[str] = []  # parameters and buffers of a loss function
        if isinstance(owner, nn.Module):
            self._modules += map(id, owner._modules.values())
            self._constants += (name for name, x in _tensors_of(owner).items() if id(x) in constants)
        reads, is_function = self.compared.reads, isinstance(owner, types.FunctionType)
        holds_read = isinstance(owner, CONTAINERS) and attribute_of(self.path) in reads
        if not is_function and not isinstance(owner, type | torch.Tensor):
            self.values[""] = code(type(owner))
        for name, x in _contents(owner, self._constants).items():
            is_read = is_function or name in reads
            if name in self.compared.sets or (self.is_far and not is_read):
                continue
            self._names.append(name)
            value = self.compared.value(x)
            if value is not None and (is_read or holds_read or not isinstance(value, Code)):
                self.values[str(name)] = value
            if isinstance(x, _BY_VALUE):
                if value is not None:
                    self._by_value.append((_weak(x), value))
            elif not is_plain(x) and _is_compared(x):
                self._objects[name] = _weak(x)
        self._ids = _ids(owner, self._names, self._constants)
        self._alive = [x for x in self._objects.values() if type(x) is weakref.ref]

    def is_same(self) -> bool:
        """Whether it holds the same objects as when this was made, with the same values."""
        owner = strong(self.owner)
        if type(owner) is not self._type or _ids(owner, self._names, self._constants) != self._ids:
            return False
        for ref in self._alive:  # else another one may have taken its address
            if ref() is None:
                return False
        return not self._by_value or all(self.compared.value(strong(x)) == v for x, v in self._by_value)

    def again(self) -> Place | None:
        """The place as it is now; None if it holds other objects, whose contents count as well."""
        owner = strong(self.owner)
        if type(owner) is not self._type:
            return None
        new = Place(self.path, owner, self.is_far, self.compared)
        same = new._modules == self._modules and new._objects.keys() == self._objects.keys()
        return new if same and all(map(operator.is_, new._objects.values(), self._objects.values())) else None


def _contents_of(tensor: torch.Tensor) -> bytes | None:
    """Its bytes, since writing to its ``data`` leaves no trace; None if a step should not read them."""
    is_plain_one = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain_one or tensor.device.type != "cpu" or tensor.nbytes > _LARGEST_ARRAY:
        return None
    as_written = tensor.detach().resolve_conj().resolve_neg()
    dense = as_written.reshape(-1).clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8).numpy(force=True).tobytes()


def code(x: Any) -> Code:
    return Code(name_and_line(x), _weak(x))


def strong(x: Any) -> Any:
    return x() if type(x) is weakref.ref else x


def attribute_of(path: str) -> str:
    """Of an object, or the variable of a function, that leads to an owner, also by containers."""
    return next((name for name in reversed(path.split(".")) if not name.isdigit()), "")


def _tensors_of(module: nn.Module) -> dict[str, Any]:
    return {**module._parameters, **module._buffers}


def _contents(owner: Any, constants: Collection[str] = ()) -> Mapping[Any, Any]:
    """Those that are compared; parameters and buffers of a module, but constants, stand for themselves."""
    if not isinstance(owner, nn.Module):
        return owner.__dict__ if isinstance(owner, type) else own(owner)
    contents = {name: x for name, x in vars(owner).items() if name not in OF_MODULES}
    for kind, tensors in (("a parameter", owner._parameters), ("a buffer", owner._buffers)):
        contents |= {name: x if name in constants else kind for name, x in tensors.items() if x is not None}
    return contents


def _ids(owner: Any, names: Collection[Any], constants: Collection[str]) -> list[int]:
    """The number of names in an owner, and the addresses of what these stand for.

    constants: the names of those of a module's tensors that are constants.
    """
    if isinstance(owner, nn.Module):
        contents = owner.__dict__
        held = owner._modules.values(), owner._parameters.values()  # properties of a TorchScript module
        absent = [x is None for x in owner._buffers.values()]
        buffers = (x for name, x in owner._buffers.items() if name in constants)
        return [len(contents), *absent, *map(id, chain(map(contents.get, names), buffers, *held))]
    if isinstance(owner, list | tuple | deque):
        return [*map(id, owner)]
    if isinstance(owner, types.FunctionType) and not owner.__closure__:
        own_objects = owner.__code__, owner.__defaults__, *vars(owner).values()
        return [*map(id, chain(map(owner.__globals__.get, names), own_objects))]
    named = _contents(owner)
    return [len(named), *map(id, map(named.get, names))]


def _is_compared(x: Any) -> bool:
    """Whether another object in its place may be another setting."""
    if isinstance(x, nn.Module):
        return False
    return isinstance(x, CONTAINERS) or callable(function_of(x)) or has_attributes(x)


def _weak(x: Any) -> Any:
    try:
        return weakref.ref(x)
    except TypeError:  # a list, a tuple, a function in C
        return x
