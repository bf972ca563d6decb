"""What the forward of a model and its loss function read: modules, objects, containers, functions, classes.

The search follows attributes and containers, and from functions their variables: of closures, the globals
that they name, and of the environment if they read it.  In what is further away than an object in an
attribute, names that no function has do not count.
"""

from __future__ import annotations

import argparse
import enum
import functools
import inspect
import os
import sys
import sysconfig
import threading
import types
from collections import UserDict, UserList, deque
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fxpipe.runtime.functions import name_and_line, names_in

#: Values that are compared rather than identified.
PLAIN = (
    bool, int, float, complex, Fraction, Decimal, str, bytes, range, np.generic, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
#: What each module has: its tensors and hooks are looked at elsewhere.
OF_MODULES = vars(nn.Module()).keys() - {"training"}
LOSS = "loss_fn"
"""The path of the loss function."""
CODE = "__code__"
"""The name of a function's code."""
CONTAINERS = (dict, list, tuple, deque, types.MappingProxyType)
#: Methods that make an object: what they set is no state of the forward.
_CONSTRUCTORS = {"__init__", "__new__", "__post_init__"}
#: Other special methods that a forward does not run, or that set what it keeps.
_OTHER_METHODS = {
    f"__{name}__"
    for name in (
        "init_subclass", "setstate", "getstate", "reduce", "reduce_ex", "copy", "deepcopy", "repr", "str",
        "eq", "hash", "dir", "setattr", "delattr",
    )
}  # fmt: skip
#: Methods of an ``autograd.Function`` that autograd calls.
_BY_AUTOGRAD = {"forward", "setup_context", "backward", "vjp", "jvp", "vmap"}
#: What has settings of an optimizer, of which code reads few.
_OPTIMIZERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
#: Of the standard library and torch, what keeps settings in attributes.
_KEEPERS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, *_OPTIMIZERS)
#: The contents of longer containers are no settings.
_MOST_ENTRIES = 1000
#: What has another value in another context, or in another thread.
_OF_CONTEXTS = (ContextVar, threading.local)
#: A function that keeps its results.
_CACHED = type(functools.cache(len))
#: ``Py_TPFLAGS_HEAPTYPE``: a class that Python code made.
_HEAP_TYPE = 1 << 9
#: Packages whose functions and objects have no settings of a model.
_OTHERS = frozenset({*sys.stdlib_module_names, "torch", "numpy", "fxpipe", ""}) - {"__main__"}

#: Where installed packages are.
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class _Found(NamedTuple):
    path: str
    thing: Any
    is_far: bool


@dataclass
class Reached:
    """``owners``: what has settings, by its path: modules, objects, containers, functions, modules of Python.
    ``far``: the paths of those in which only names of ``reads`` count: these are the attributes that
    functions name, and their texts, for getattr.  ``sets``: the attributes, globals and variables that they
    set.
    """

    owners: dict[str, Any] = field(default_factory=dict)
    far: set[str] = field(default_factory=set)
    classes: dict[type, None] = field(default_factory=dict)
    reads: set[str] = field(default_factory=lambda: {"forward"})
    sets: set[str] = field(default_factory=set)
    _seen: set[int] = field(default_factory=set)
    _of_instances: set[type] = field(default_factory=set)
    _named: set[type] = field(default_factory=set)  # classes that code names
    _method_of: dict[int, type] = field(default_factory=dict)  # of these, by id
    _stored_by: dict[type, set[str]] = field(default_factory=dict)  # attributes that their methods set
    _waiting: dict[str, list[_Found]] = field(default_factory=dict)  # by a name that no function reads
    _todo: list[_Found] = field(default_factory=list)

    @staticmethod
    def of(model: nn.Module, loss_fn: Any = None) -> Reached:
        reached = Reached()
        for path, thing in (("", model), (LOSS, loss_fn)):
            reached._follow(_Found(path, thing, True))
            reached._visit_all()
        reached._waiting.clear()
        for cls, stored in reached._stored_by.items():
            # Objects that the forward makes are gone after it: state is what the class itself has.
            lasts = stored if cls in reached._of_instances else stored & set(dir(cls))
            reached.sets |= lasts
        return reached

    @staticmethod
    def without_model(
        owners: Mapping[str, Any], far: Collection[str], reads: Collection[str], loss_fn: Any
    ) -> Reached:
        """What the loss function reads, and what is left of a model that is gone: of its functions, their
        classes, and what these lead to.

        owners: what is left, by the path that it had.  far, reads: see above.
        """
        reached = Reached(reads={*reads})
        reached.owners |= {path: x for path, x in owners.items() if not isinstance(x, type)}
        reached._seen |= {*map(id, reached.owners.values())}
        for path, x in owners.items():
            reached._hold(x) if isinstance(x, type) else reached._enter(path, x, path in far)
        reached._follow(_Found(LOSS, loss_fn, True))
        reached._visit_all()
        return reached

    def _visit_all(self) -> None:
        while self._todo:
            self._visit(self._todo.pop())

    def _visit(self, found: _Found) -> None:
        path, thing, is_far = found
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        if isinstance(thing, types.FunctionType):
            path, is_far = self._free(name_and_line(thing)), False
            self._read_names(thing)
        elif not isinstance(thing, (torch.Tensor, *_OPTIMIZERS)):  # what their methods set is no state
            for cls in type(thing).__mro__:
                self._visit_class(cls)
        self._enter(path, thing, is_far)

    def _enter(self, path: str, thing: Any, is_far: bool) -> None:
        """Follow what it holds."""
        contents = own(thing)
        if contents or not isinstance(thing, types.FunctionType):
            self.owners[path] = thing
        is_far = isinstance(thing, _OPTIMIZERS) or (
            is_far and not isinstance(thing, (*CONTAINERS, *_OF_CONTEXTS))
        )
        if is_far:
            self.far.add(path)
        is_module = isinstance(thing, nn.Module)
        for name, x in contents.items():
            if not (is_module and name in OF_MODULES):
                entry = _Found(joined(path, name), x, not is_module)
                self._wait(str(name), entry) if is_far else self._follow(entry)
        for name, x in thing._parameters.items() if is_module else ():
            for attribute in () if x is None else vars(x):
                self._wait(attribute, _Found(joined(path, name), x, True))

    def _free(self, path: str) -> str:
        """The path, with a number where another function of the same line has it."""
        numbers = (f"{path} #{number}" for number in count(2))
        return next(x for x in chain([path], numbers) if x not in self.owners)

    def _follow(self, found: _Found) -> None:
        path, x, is_far = found
        if isinstance(x, nn.Module):
            if is_far:  # else one of the model's that is in an attribute as well
                modules = x.named_modules()
                self._todo += (_Found(joined(path, below), module, False) for below, module in modules)
        elif isinstance(x, types.MethodType):
            for bound in (x.__self__, x.__func__):
                self._follow(_Found(path, bound, True))
        elif isinstance(x, type):
            for cls in inspect.getmro(x) + inspect.getmro(type(x)):
                self._name_class(cls)
        elif isinstance(x, _CACHED):
            self._follow(found._replace(thing=x.__wrapped__))
        elif isinstance(x, functools.partial):
            for part in (x.func, x.args, x.keywords):
                self._follow(_Found(path, part, True))
        elif isinstance(x, types.FunctionType) or _has_settings(x, is_far):
            self._todo.append(found)

    def _visit_class(self, cls: type) -> None:
        """Methods count once a function names them; those with special names are called without."""
        if cls in self._of_instances or not _is_made(cls):
            return
        self._of_instances.add(cls)
        self._hold(cls)
        for name, x in vars(cls).items():
            function = function_of(x)
            if isinstance(function, types.FunctionType) and name not in _OTHER_METHODS | _CONSTRUCTORS:
                found = _Found(name, function, True)
                self._follow(found) if name.startswith("__") else self._wait(name, found)

    def _name_class(self, cls: type) -> None:
        """The forward may make objects of a class that its code names, and call its methods."""
        if cls in self._named or not _is_made(cls) or not _is_users(cls):
            return
        self._named.add(cls)
        self._hold(cls)
        if not _may_be_set(cls):
            return
        of_autograd = _BY_AUTOGRAD if issubclass(cls, torch.autograd.Function) else ()
        # The modules of a model are there already, and their constructors read what the forward does not.
        others = _OTHER_METHODS | _CONSTRUCTORS if issubclass(cls, nn.Module) else _OTHER_METHODS
        for name, x in vars(cls).items():
            function = function_of(x)
            if isinstance(function, types.FunctionType) and name not in others:
                self._method_of[id(function)] = cls
                found = _Found(name, function, True)
                is_called = name.startswith("__") or name in of_autograd
                self._follow(found) if is_called else self._wait(name, found)

    def _hold(self, cls: type) -> None:
        if cls not in self.classes:
            self.classes[cls] = None
            for name, x in vars(cls).items():
                if (not name.startswith("__") and not callable(function_of(x))) or isinstance(x, type):
                    self._wait(name, _Found(f"{class_path(cls)}.{name}", x, True))

    def _wait(self, name: str, found: _Found) -> None:
        if name in self.reads:
            self._follow(found)
        else:
            self._waiting.setdefault(name, []).append(found)

    def _read_names(self, function: types.FunctionType) -> None:
        names = names_in(function.__code__)
        self.sets |= names.rebound
        cls = self._method_of.get(id(function))
        if cls is None:
            self.sets |= names.stored
        elif function.__name__ not in _CONSTRUCTORS:
            self._stored_by.setdefault(cls, set()).update(names.stored)
        read = names.attributes | names.texts | names.globals | {*function.__code__.co_freevars}
        self.reads |= read
        if read & {"environ", "getenv"}:
            self._todo.append(_Found("os.environ", os.environ, True))
        for name in read & self._waiting.keys():
            for found in self._waiting.pop(name):
                self._follow(found)


def own(owner: Any) -> Mapping[Any, Any]:
    """The contents of an owner."""
    match owner:
        case dict():  # a subclass may have methods of its own
            return owner if type(owner) is dict else dict(dict.items(owner))
        case types.MappingProxyType():
            return dict(owner)
        case list() | tuple() | deque():
            return dict(enumerate(owner))
        case types.FunctionType():
            return dict(_variables(owner))
        case ContextVar():
            return _value_of(owner)
        case torch.optim.Optimizer():
            return {"param_groups": owner.param_groups}
        case torch.optim.lr_scheduler.LRScheduler():
            return {**vars(owner), "get_last_lr": owner.get_last_lr()}
        case os._Environ():  # its texts are other objects each time
            return {os.fsdecode(name): value for name, value in os.environb.items()}
        case _:
            return {**_slots(owner), **getattr(owner, "__dict__", {})}


def _value_of(variable: ContextVar[Any]) -> dict[str, Any]:
    try:
        return {"value": variable.get()}
    except LookupError:
        return {}


def class_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_made(cls: type) -> bool:
    """By Python code, but torch's own base of modules."""
    return cls is not nn.Module and bool(cls.__flags__ & _HEAP_TYPE)


def _may_be_set(cls: type) -> bool:
    """Whether the methods of a class that code names may read what a script sets between steps.

    Libraries name hundreds of classes, of which a model makes few: those of installed packages count if they
    have numbers, or if autograd calls them.
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    numbers = (isinstance(x, int | float | torch.Tensor) for x in vars(cls).values())
    return not file.startswith(_INSTALLED) or issubclass(cls, torch.autograd.Function) or any(numbers)


def has_attributes(x: Any) -> bool:
    return bool(type(x).__dictoffset__) or any(_slot_names(type(x)))


def is_plain(x: Any) -> bool:
    return isinstance(x, PLAIN) or (isinstance(x, tuple) and all(map(is_plain, x)))


def function_of(x: Any) -> Any:
    """That of a property or a method; a bound method is another object each time."""
    if isinstance(x, property):
        return x.fget
    return x.__func__ if isinstance(x, staticmethod | classmethod | types.MethodType) else x


def joined(path: str, name: Any) -> str:
    return f"{path}.{name}" if path and name != "" else path or str(name)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Its code, the variables of its closure, its attributes and defaults, and the globals that it names, in
    code of users."""
    if not _is_users(function):
        return
    yield CODE, function.__code__
    for name, x in vars(function).items():
        if not name.startswith("__") and (is_plain(x) or isinstance(x, CONTAINERS)):
            yield name, x
    given, defaults = function.__code__.co_varnames[: function.__code__.co_argcount], function.__defaults__
    for name, x in zip(reversed(given), reversed(defaults or ()), strict=False):
        if is_plain(x) or (isinstance(x, CONTAINERS) and x):  # an empty one is mostly a cache
            yield name, x
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if cell != types.CellType():  # it has a value
            yield name, cell.cell_contents
    for name in names_in(function.__code__).globals & function.__globals__.keys():
        yield name, function.__globals__[name]


def _has_settings(x: Any, is_far: bool) -> bool:
    """Objects that are far away have some if their class is a user's."""
    if isinstance(x, CONTAINERS):
        return len(x) <= _MOST_ENTRIES and not is_plain(x)
    if isinstance(x, _OF_CONTEXTS) or (isinstance(x, nn.Parameter) and vars(x)):
        return True
    if isinstance(x, (nn.Module, torch.Tensor, type, np.ndarray, *PLAIN)):
        return False
    if is_far or isinstance(x, types.ModuleType):
        return isinstance(x, _KEEPERS) or _is_users(x if isinstance(x, types.ModuleType) else type(x))
    return has_attributes(x) and (not callable(x) or _is_users(type(x)))


def _is_users(code: Any) -> bool:
    """Whether a module, class or function belongs neither to torch nor to the standard library."""
    name = code.__name__ if isinstance(code, types.ModuleType) else getattr(code, "__module__", "")
    return str(name).partition(".")[0] not in _OTHERS


def _slot_names(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ()) if base.__flags__ & _HEAP_TYPE else ()
        yield from (x for x in ([slots] if isinstance(slots, str) else slots) if not x.startswith("__"))


def _slots(owner: Any) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in _slot_names(type(owner)) if hasattr(owner, name)}
