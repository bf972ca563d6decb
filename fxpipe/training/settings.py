"""The Python that a program takes from its model and its loss function once, when they are compiled.

    drop.p                  0.1
    blocks.0                the class of a module
    blocks.0.activation     a function in an attribute
    Block.forward           a method
    config.text.window      4, of an object, a dict or a list in an attribute
    beta in loss (net.py:7)  0.5, a global that the function names, or a variable of its closure
    weights                 a tensor that is a constant of the program

What the code sets itself outside of constructors is its state, which eager runs change as well: counters,
flags, lengths of caches.
"""

from __future__ import annotations

import inspect
import operator
import types
import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fxpipe.runtime.functions import name_and_line
from fxpipe.training.reached import (
    CONTAINERS,
    LOSS,
    OF_MODULES,
    PLAIN,
    Reached,
    function_of,
    has_attributes,
    is_plain,
    joined,
    own,
)

#: What can change without another object in its place.
_BY_VALUE = (set, torch.Tensor, np.ndarray)
#: Larger arrays are not compared.
_LARGEST_ARRAY = 1 << 16
Key = tuple[str, str]
"""The path of an owner (``Reached``) or of a class; and an attribute, "" for its class."""


class Code(NamedTuple):
    """A function or a class, by its name and line.  It is not kept: it may hold the model."""

    text: str
    ref: Any

    def __repr__(self) -> str:
        return self.text


class Numbers(NamedTuple):
    """A tensor that is a constant of the program, and how often it was written; or the bytes of an array."""

    kind: str
    ref: Any
    contents: Any

    def __repr__(self) -> str:
        return f"{self.kind} with other values"


class Change(NamedTuple):
    """None: there was nothing before, or is nothing now."""

    name: str
    before: Any
    now: Any
    is_of_code: bool

    def __str__(self) -> str:
        whose = "" if self.name.startswith(LOSS) else "The model's "
        if isinstance(self.before, Numbers):
            return f"{whose}{self.name} has other values than when it was compiled: programs run with those."
        return (
            f"{whose}{self.name} was {self.before!r} when it was compiled, and is {self.now!r}: "
            f"programs run with {self.before!r}."
        )


class Settings:
    """Those of a model and its loss function when this is made, and how they change.

    It does not keep the model.  constants: the tensors that programs hold the values of.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Any = None, constants: Sequence[weakref.ref[torch.Tensor]] = ()
    ):
        self._loss_fn = loss_fn
        self._constants = {id(tensor): ref for ref in constants if (tensor := ref()) is not None}
        reached = Reached.of(model, loss_fn)
        self._reads, self._sets = reached.reads, reached.sets
        self._then = self._described(reached)
        self._paths = {path for path, _ in self._then}
        self._places = self._places_of(reached)

    def changes(self, model: nn.Module, *, trains: bool = True) -> list[Change]:
        """trains: whether the mode of the whole model matters."""
        # In nearly all steps all objects are the same: a microsecond or two a module.
        if all(place.is_same() for place in self._places):
            return []
        reached = Reached.of(model, self._loss_fn)
        now, then, found = self._described(reached), self._then, []
        for path, name in now.keys() | then.keys():
            before, after = then.get((path, name)), now.get((path, name))
            if before != after and self._matters(path, name, now, trains):
                owner = reached.owners.get(path)
                of_class = _of_class(owner, name)
                before, after = (of_class if x is None else x for x in (before, after))
                is_function = isinstance(owner, types.FunctionType)
                called = f"{name} in {path}" if is_function and name else joined(path, name) or "class"
                is_of_code = not is_function and any(isinstance(x, Code) for x in (before, after))
                if before != after:
                    found.append(Change(called, before, after, is_of_code))
        if trains and not any(change.is_of_code for change in found):
            self._places = self._places_of(reached)
        return sorted(found, key=lambda change: change.name)

    def _matters(self, path: str, name: str, now: dict[Key, Any], trains: bool) -> bool:
        owner = path, ""
        if (name or path.rpartition(".")[2]) in self._sets:
            return False
        if name == "training" and now.get(("", name)) != self._then.get(("", name)):
            return trains and not path and name in self._reads  # one message for all modules
        if name and (path not in self._paths or now.get(owner) != self._then.get(owner)):
            return False  # of a new module, of another one, or of its class: a change by itself
        return (path, name) in self._then or not name or name in self._reads

    def _described(self, reached: Reached) -> dict[Key, Any]:
        found: dict[Key, Any] = {}
        for path, owner in reached.owners.items():
            found[path, ""] = None if isinstance(owner, types.FunctionType) else _code(type(owner))
        named = [(path, x, path in reached.far) for path, x in reached.owners.items()]
        named += [(f"{cls.__module__}.{cls.__qualname__}", cls, True) for cls in reached.classes]
        for path, owner, only_read in named:
            is_function = isinstance(owner, types.FunctionType)
            for name, x in _own(owner).items():
                value = self._value(x)
                is_read = is_function or name in self._reads
                if value is not None and (is_read or not (only_read or isinstance(value, Code))):
                    found[path, str(name)] = value
        return found

    def _value(self, x: Any) -> Any:
        """What stands for it in comparisons; None for what is not compared."""
        if is_plain(x):
            return x
        if isinstance(x, set | frozenset):
            return frozenset(x) if all(map(is_plain, x)) else None
        if id(x) in self._constants and not x.is_inference():
            return Numbers("a tensor", self._constants[id(x)], x._version)
        if isinstance(x, np.ndarray) and x.nbytes <= _LARGEST_ARRAY and not x.dtype.hasobject:
            return Numbers("an array", None, x.tobytes())
        function = function_of(x)
        is_code = callable(function) and not isinstance(x, (nn.Module, torch.Tensor))
        return _code(function) if is_code else None

    def _places_of(self, reached: Reached) -> list[_Place]:
        owners = (*reached.owners.values(), *reached.classes)
        return [_Place(x, self._reads, self._value) for x in owners]


class _Place:
    """The objects in an owner or in a class, to see that they are the same."""

    def __init__(self, owner: Any, reads: Collection[str], value: Any):
        self._owner, self._type = _weak(owner), type(owner)
        contents, is_class = _own(owner), isinstance(owner, type)
        self._size, self._value = len(contents), value
        of_module = OF_MODULES if isinstance(owner, nn.Module) else ()
        compared = {k: x for k, x in contents.items() if k in reads or (k not in of_module and not is_class)}
        self._plain = [name for name, x in compared.items() if isinstance(x, PLAIN)]
        self._values = [contents[name] for name in self._plain]
        by_value = {name: value(x) for name, x in compared.items() if isinstance(x, _BY_VALUE)}
        self._by_value = [(name, x) for name, x in by_value.items() if x is not None]
        others = {name: x for name, x in compared.items() if name not in self._plain and _is_compared(x)}
        self._names, self._others = [*others], [_weak(x) for x in others.values()]
        self._modules = _modules(owner)  # each is a place, too, so that none has taken its address

    def is_same(self) -> bool:
        owner = _strong(self._owner)
        if owner is None or type(owner) is not self._type:
            return False
        now = _own(owner)
        if len(now) != self._size or not all(map(operator.is_, map(now.get, self._plain), self._values)):
            return False
        if self._names and not all(map(operator.is_, map(now.get, self._names), map(_strong, self._others))):
            return False
        if any(self._value(now.get(name)) != x for name, x in self._by_value):
            return False
        return not self._modules or _modules(owner) == self._modules


def _own(owner: Any) -> Any:
    """The contents of an owner that are compared; a parameter of a module stands for itself."""
    if isinstance(owner, nn.Module):
        parameters = {name: "a parameter" for name, x in owner._parameters.items() if x is not None}
        return vars(owner) | parameters
    return owner.__dict__ if isinstance(owner, type) else own(owner)


def _modules(owner: Any) -> list[int]:
    return [*map(id, owner._modules.values())] if isinstance(owner, nn.Module) else []


def _is_compared(x: Any) -> bool:
    """Whether another object in its place may be another setting."""
    if isinstance(x, (*_BY_VALUE, nn.Module)):
        return False
    return isinstance(x, CONTAINERS) or callable(function_of(x)) or has_attributes(x)


def _of_class(owner: Any, name: str) -> Any:
    """What an attribute is where the object itself has none."""
    x = inspect.getattr_static(type(owner), name, None) if name else None
    return x if x is None or is_plain(x) else _code(function_of(x)) if callable(function_of(x)) else None


def _code(x: Any) -> Code:
    return Code(name_and_line(x), _weak(x))


def _weak(x: Any) -> Any:
    try:
        return weakref.ref(x)
    except TypeError:  # a list, a tuple, a function in C
        return x


def _strong(x: Any) -> Any:
    return x() if type(x) is weakref.ref else x
