"""The Python that a program takes from its model once, when it is compiled: settings, functions, classes.

    drop.p                 0.1
    blocks.0               the class of a module
    blocks.0.activation    a function in an attribute
    Block.forward          a method
    config.window          4, of an object, a dict or a list in an attribute

What the model's code sets itself outside of constructors is its state, which eager runs change as well:
counters, flags, lengths of caches.
"""

from __future__ import annotations

import enum
import inspect
import operator
import types
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fxpipe.runtime.functions import name_and_line, names_in

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)
_TENSORS_AND_MODULES = (nn.Module, torch.Tensor)
#: What each module has: its tensors and hooks are looked at elsewhere.
_OWN = vars(nn.Module()).keys() - {"training"}
_CONSTRUCTORS = {"__init__", "__new__", "__setstate__", "__deepcopy__"}
#: The contents of longer containers are no settings.
_MOST_ENTRIES = 1000
Key = tuple[str, str]
"""The path of a module, of what is in an attribute, or of a class; and an attribute, "" for its class."""


class Code(NamedTuple):
    """A function or a class, by its name and line.  It is not kept: it may hold the model."""

    text: str
    ref: Any

    def __repr__(self) -> str:
        return self.text


class Change(NamedTuple):
    """None: there was nothing before, or is nothing now."""

    name: str
    before: Any
    now: Any

    @property
    def is_of_code(self) -> bool:
        return isinstance(self.before, Code) or isinstance(self.now, Code)


class Settings:
    """Those of a model when this is made, and how they change.  It does not keep the model."""

    def __init__(self, model: nn.Module):
        self._reads, self._sets = _names(_classes(_owners(model)))
        self._then = _described(model, self._reads)
        self._paths = {path for path, _ in self._then}
        self._places = _places(model, self._reads)

    def changes(self, model: nn.Module) -> list[Change]:
        # In nearly all steps all objects are the same: a microsecond or two a module.
        if all(place.is_same() for place in self._places):
            return []
        now, owners, then = _described(model, self._reads), _owners(model), self._then
        found = []
        for path, name in now.keys() | then.keys():
            before, after = then.get((path, name)), now.get((path, name))
            if before != after and self._matters(path, name, now):
                of_class = _of_class(owners.get(path), name)
                named = ".".join(filter(None, (path, name))) or "class"
                found.append(Change(named, *(of_class if x is None else x for x in (before, after))))
        if not any(change.is_of_code for change in found):
            self._places = _places(model, self._reads)
        return sorted(found, key=lambda change: change.name)

    def _matters(self, path: str, name: str, now: Mapping[Key, Any]) -> bool:
        owner = path, ""
        if (name or path.rpartition(".")[2]) in self._sets:
            return False
        if name == "training":  # a program has its mode, whatever the mode of the whole model
            return now.get(("", name)) == self._then.get(("", name))
        if name and (path not in self._paths or now.get(owner) != self._then.get(owner)):
            return False  # of a new module, of another one, or of its class: a change by itself
        return (path, name) in self._then or not name or name in self._reads


def _of_class(owner: Any, name: str) -> Any:
    """What an attribute is where the object itself has none."""
    return _value(inspect.getattr_static(type(owner), name, None)) if name else None


class _Place:
    """The objects in a module, in what is in an attribute, or in a class, to see that they are the same."""

    def __init__(self, owner: Any, reads: Collection[str]):
        self._owner = _weak(owner)
        own, is_class = _own(owner), isinstance(owner, type)
        self._size = len(own)
        compared = {k: x for k, x in own.items() if k in reads or (k not in _OWN and not is_class)}
        self._plain = [name for name, x in compared.items() if isinstance(x, _PLAIN)]
        self._values = [own[name] for name in self._plain]
        others = {name: x for name, x in compared.items() if name not in self._plain and _is_compared(x)}
        self._names, self._others = [*others], [_weak(x) for x in others.values()]
        self._modules = [*map(id, _modules(own))]  # each is a place, too, so that none has taken its address

    def is_same(self) -> bool:
        owner = _strong(self._owner)
        if owner is None:
            return False
        own = _own(owner)
        if len(own) != self._size or not all(map(operator.is_, map(own.get, self._plain), self._values)):
            return False
        if self._names and not all(map(operator.is_, map(own.get, self._names), map(_strong, self._others))):
            return False
        return not self._modules or [*map(id, _modules(own))] == self._modules


def _places(model: nn.Module, reads: Collection[str]) -> list[_Place]:
    owners = _owners(model)
    return [_Place(x, reads) for x in (*owners.values(), *_classes(owners))]


def _described(model: nn.Module, reads: Collection[str]) -> dict[Key, Any]:
    owners = _owners(model)
    classes = _classes(owners)
    found: dict[Key, Any] = {(path, ""): _code(type(x)) for path, x in owners.items()}
    named = [*owners.items(), *((f"{cls.__module__}.{cls.__qualname__}", cls) for cls in classes)]
    for path, owner in named:
        for name, x in _own(owner).items():
            value = None if name in _OWN else _value(x)
            if value is None or ((isinstance(owner, type) or isinstance(value, Code)) and name not in reads):
                continue
            found[path, str(name)] = value
    return found


def _owners(model: nn.Module) -> dict[str, Any]:
    """The modules, and the objects, dicts and lists in their attributes, by their paths."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[path] = module
        for name, x in vars(module).items():
            if name not in _OWN and _has_settings(x):
                found[f"{path}.{name}" if path else name] = x
    return found


def _has_settings(x: Any) -> bool:
    if type(x) in (dict, list):
        return len(x) <= _MOST_ENTRIES
    others = (*_TENSORS_AND_MODULES, type, types.ModuleType, enum.Enum)
    return bool(type(x).__dictoffset__) and not isinstance(x, others) and not callable(x)


def _own(owner: Any) -> Mapping[Any, Any]:
    """The contents of an owner."""
    if type(owner) is dict:
        return owner
    return dict(enumerate(owner)) if type(owner) is list else vars(owner)


def _modules(own: Mapping[Any, Any]) -> Collection[nn.Module]:
    return own["_modules"].values() if "_modules" in own else ()


def _is_compared(x: Any) -> bool:
    return (
        isinstance(x, tuple)
        or _has_settings(x)
        or (callable(_function(x)) and not isinstance(x, _TENSORS_AND_MODULES))
    )


def _value(x: Any) -> Any:
    """What stands for it in comparisons; None for what is not compared."""
    if isinstance(x, _PLAIN) or (isinstance(x, tuple) and all(isinstance(item, _PLAIN) for item in x)):
        return x
    function = _function(x)
    return _code(function) if callable(function) and not isinstance(x, _TENSORS_AND_MODULES) else None


def _function(x: Any) -> Any:
    """That of a property or a method; a bound method is another object each time."""
    if isinstance(x, property):
        return x.fget
    return x.__func__ if isinstance(x, staticmethod | classmethod | types.MethodType) else x


def _code(x: Any) -> Code:
    return Code(name_and_line(x), _weak(x))


def _weak(x: Any) -> Any:
    try:
        return weakref.ref(x)
    except TypeError:  # a list, a tuple, a function in C
        return x


def _strong(x: Any) -> Any:
    return x() if type(x) is weakref.ref else x


def _classes(owners: Mapping[str, Any]) -> list[type]:
    """Those that have the code of the owners, but for what is written in C and torch's base of modules."""
    bases = dict.fromkeys(base for x in owners.values() for base in type(x).__mro__)
    return [cls for cls in bases if cls is not nn.Module and cls.__flags__ & _HEAP_TYPE]


#: ``Py_TPFLAGS_HEAPTYPE``: a class that Python code made.
_HEAP_TYPE = 1 << 9


def _names(classes: Iterable[type]) -> tuple[set[str], set[str]]:
    """The attributes that the forward reads, with the methods that it names, and those that it sets."""
    methods: dict[str, list[types.CodeType]] = {}
    for name, x in ((name, x) for cls in classes for name, x in vars(cls).items()):
        function = _function(x)
        if isinstance(function, types.FunctionType):
            methods.setdefault(name, []).append(function.__code__)
    reads, sets = {"forward"}, set[str]()
    todo = ["forward", *(name for name in methods if name.startswith("__") and name not in _CONSTRUCTORS)]
    while todo:
        for code in methods.pop(todo.pop(), ()):
            names = names_in(code)
            texts = {x for x in code.co_consts if isinstance(x, str)}  # for getattr
            sets |= names.stored
            reads |= names.attributes | texts
            todo += (names.attributes | texts) & methods.keys()
    return reads, sets
