"""What is compared in one owner of a model's Python state: values by name, and the objects that lead on."""

from __future__ import annotations

import operator
import os
import types
import weakref
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fxpipe.python_state.objects import (
    CONTAINERS,
    OF_MODULES,
    contents,
    function_of,
    has_attributes,
    is_plain,
    kind_of,
)
from fxpipe.runtime.functions import name_and_line
from fxpipe.runtime.torch_private import tensors_by_kind

#: Larger arrays are not compared, and of larger tensors the version alone.
_LARGEST_ARRAY = 1 << 16
#: What can change without another object in its place, and holds no other objects.
_BY_VALUE = (set, bytearray, torch.Tensor, np.ndarray)


class Code(NamedTuple):
    """A function or a class, by its name and line.  It is not kept: it may hold the model."""

    text: str
    ref: object

    def __repr__(self) -> str:
        return self.text


class Numbers(NamedTuple):
    """A tensor that is a constant of the program, how often it was written, and its bytes if they are few; or
    the bytes of an array."""

    kind: str
    ref: object
    contents: object

    def __repr__(self) -> str:
        return f"{self.kind} with other values"


@dataclass(frozen=True)
class Compared:
    """What is compared.  ``reads``: the names that functions read.  ``sets``: those that they set, which are
    not.  ``constants``: tensors whose values programs hold, by id.  ``stored``: what the forward has set in
    the trace, by ``kind_of`` what has it, if that is known: a method of a name that code calls may be the
    script's, and another object may have an attribute of the same name.
    """

    reads: Collection[str]
    sets: Collection[str]
    constants: Mapping[int, weakref.ref[torch.Tensor]]
    stored: Mapping[str, Collection[str]] | None = None

    def is_set(self, owner: object, name: str) -> bool:
        """Whether the model's own code sets what an owner has under a name, or nothing reads that."""
        if name not in self.sets or self.stored is None or owner is None:
            return name in self.sets
        return name not in self.reads or name in self.stored.get(kind_of(owner), ())

    def is_constant(self, x: object) -> bool:
        ref = self.constants.get(id(x))  # another one may have the address of one that is gone
        return ref is not None and ref() is x

    def value(self, x: object) -> object:
        """What stands for it in comparisons; None for what is not compared."""
        if is_plain(x):
            return x
        if isinstance(x, set | frozenset):
            return frozenset(x) if all(map(is_plain, x)) else None
        if isinstance(x, bytearray):
            return bytes(x) if len(x) <= _LARGEST_ARRAY else None
        if isinstance(x, types.CodeType):
            return Code(f"{x.co_name} ({Path(x.co_filename).name}:{x.co_firstlineno})", weak(x))
        if isinstance(x, torch.Tensor) and self.is_constant(x) and not x.is_inference():
            return Numbers("a tensor", self.constants[id(x)], (x._version, _bytes_of(x)))
        if isinstance(x, np.ndarray) and x.nbytes <= _LARGEST_ARRAY and not x.dtype.hasobject:
            return Numbers("an array", None, x.tobytes())
        function = function_of(x)
        is_code = callable(function) and not isinstance(x, (nn.Module, torch.Tensor))
        return code(function) if is_code else None


@dataclass(eq=False)
class GuardSlots:
    """What one owner, or class, holds when this is made.  The owner is not kept.

    names: of what is compared.  values: by name, those that stand for themselves.
    objects: by name, those whose contents count as well.
    by_value: what can change without another object in its place, and its values.
    constants: the names of parameters and buffers of a loss function.
    """

    path: str
    owner: object
    is_far: bool
    compared: Compared
    values: dict[str, object] = field(init=False, default_factory=dict)
    names: list[object] = field(init=False, default_factory=list)
    objects: dict[object, object] = field(init=False, default_factory=dict)
    by_value: list[tuple[object, object]] = field(init=False, default_factory=list)
    constants: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        owner = self.owner
        self.owner, self._type = weak(owner), type(owner)
        self._modules = [*map(id, owner._modules.values())] if isinstance(owner, nn.Module) else []
        if isinstance(owner, nn.Module) and self.compared.constants:
            parameters, buffers = tensors_by_kind(owner)
            tensors = {**parameters, **buffers}
            self.constants += (name for name, x in tensors.items() if self.compared.is_constant(x))
        reads, is_function = self.compared.reads, isinstance(owner, types.FunctionType)
        holds_read = isinstance(owner, CONTAINERS) and attribute_of(self.path) in reads
        if not is_function and not isinstance(owner, type | torch.Tensor):
            self.values[""] = code(type(owner))
        for name, x in _compared_contents(owner, self.constants).items():
            is_read = is_function or name in reads
            if self.compared.is_set(owner, name) or (self.is_far and not is_read):
                continue
            self.names.append(name)
            value = self.compared.value(x)
            if value is not None and (is_read or holds_read or not isinstance(value, Code)):
                self.values[str(name)] = value
            if isinstance(x, _BY_VALUE):
                if value is not None:
                    self.by_value.append((weak(x), value))
            elif not is_plain(x) and _leads_on(x):
                self.objects[name] = weak(x)

    def is_like(self, other: GuardSlots) -> bool:
        """Whether these are slots of the same names, and what can change in place is the same."""
        same = self.names == other.names and self.constants == other.constants
        refs = ((x for x, _ in slots.by_value) for slots in (self, other))
        return same and len(self.by_value) == len(other.by_value) and all(map(operator.is_, *refs))

    def again(self) -> GuardSlots | None:
        """The slots as they are now; None if they have other objects, whose contents count as well."""
        owner = strong(self.owner)
        if type(owner) is not self._type:
            return None
        new = GuardSlots(self.path, owner, self.is_far, self.compared)
        same = new._modules == self._modules and new.objects.keys() == self.objects.keys()
        return new if same and all(map(operator.is_, new.objects.values(), self.objects.values())) else None


def ids(slots: GuardSlots, owner: object) -> list[object]:
    """The number of names in an owner, and the addresses of what these stand for."""
    if type(owner) is dict:
        return [len(owner), *map(id, map(owner.get, slots.names))]
    if isinstance(owner, list | deque):
        return [*map(id, owner)]
    if isinstance(owner, os._Environ):  # its texts are other objects each time
        return [len(owner), *map(owner.get, slots.names)]
    entries = _compared_contents(owner, slots.constants)
    children = owner._modules.values() if isinstance(owner, nn.Module) else ()
    return [type(owner), len(entries), *map(id, map(entries.get, slots.names)), *map(id, children)]


def _bytes_of(tensor: torch.Tensor) -> bytes | None:
    """Take its bytes, since writing to its ``data`` leaves no trace; None if a step should not read them."""
    is_plain_one = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain_one or tensor.device.type != "cpu" or tensor.nbytes > _LARGEST_ARRAY:
        return None
    as_written = tensor.detach().resolve_conj().resolve_neg()
    dense = as_written.reshape(-1).clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8).numpy(force=True).tobytes()


def code(x: Any) -> Code:
    return Code(name_and_line(x), weak(x))


def weak(x: object) -> object:
    try:
        return weakref.ref(x)
    except TypeError:  # a list, a tuple, a function in C
        return x


def strong(x: object) -> object:
    return x() if type(x) is weakref.ref else x


def attribute_of(path: str) -> str:
    """The attribute of an object, or the variable of a function, that leads to an owner by containers."""
    return next((name for name in reversed(path.split(".")) if not name.isdigit()), "")


def _compared_contents(owner: object, constants: Collection[str]) -> Mapping[Any, object]:
    """What an owner holds; parameters and buffers of a module, but constants, stand for themselves."""
    if not isinstance(owner, nn.Module):
        return contents(owner)
    entries = {name: x for name, x in vars(owner).items() if name not in OF_MODULES}
    for kind, tensors in zip(("a parameter", "a buffer"), tensors_by_kind(owner), strict=True):
        entries |= {name: x if name in constants else kind for name, x in tensors.items() if x is not None}
    return entries


def _leads_on(x: object) -> bool:
    """Whether another object in its place may be another setting."""
    if isinstance(x, nn.Module):
        return False
    return isinstance(x, CONTAINERS) or callable(function_of(x)) or has_attributes(x)
