"""Finds the Python objects that the forward of a model and its loss function reach: modules, objects,
containers, functions, classes.

The walk follows attributes and containers, and from functions their variables: of closures, the globals that
they name, and of the environment if they read it.  What is further away than an object in an attribute is
followed where code reads its name.  ``PythonState.everything`` follows the rest, of which code could make use
by other means: whatever a forward changes is to be restored, and what it reads by name is to be compared.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
import threading
import types
import weakref
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from torch import nn

from fxpipe.python_state.objects import (
    CONTAINERS,
    INSTALLED,
    OF_MODULES,
    OPTIMIZERS,
    SETTINGS,
    VALUES,
    class_path,
    contents,
    function_of,
    has_attributes,
    is_made,
    is_plain,
    is_users,
    joined,
    keeps_state,
)
from fxpipe.runtime.functions import name_and_line, names_in
from fxpipe.runtime.torch_private import gradient_hooks, tensors_by_kind

LOSS = "loss_fn"
"""The path of the loss function."""
#: Methods that make an object: what they set is no state of the forward.
_CONSTRUCTORS = {"__init__", "__new__", "__post_init__"}
#: Other special methods that a forward does not run, or that set what it keeps.  Since Python 3.14 a function
#: makes a class's annotations, in whose closure is all that the class has.
_OTHER_METHODS = {
    f"__{name}__"
    for name in (
        "init_subclass", "setstate", "getstate", "reduce", "reduce_ex", "copy", "deepcopy", "repr", "str",
        "eq", "hash", "dir", "setattr", "delattr", "annotate", "annotate_func",
    )
}  # fmt: skip
#: Methods of an ``autograd.Function`` that autograd calls.
_BY_AUTOGRAD = {"forward", "setup_context", "backward", "vjp", "jvp", "vmap"}
#: The contents of longer containers are no settings.
_MOST_ENTRIES = 1000
#: What has another value in another context, or in another thread.
_OF_CONTEXTS = (ContextVar, threading.local)
#: A function that keeps its results.
_CACHED = type(functools.cache(len))


@dataclass(frozen=True, eq=False, slots=True)
class Owner:
    """An object that holds others.

    path: the names that lead to it; of a function, its name and line.
    is_far: whether only names that code reads count among its contents.
    parent, name: what holds it, and under which name; None for modules of the model and for the loss.
    """

    path: str
    thing: Any
    is_far: bool
    parent: Owner | None = None
    name: str = ""

    def label(self, name: str) -> str:
        """Name one of its contents as messages call it: by the module, function or class that leads to it."""
        match self.thing:
            case nn.Module() if self.parent is None and not self.path.startswith(LOSS):
                return joined(self.path, name) if self.path else f"the model's {name}"
            case types.FunctionType() as function if name in function.__code__.co_freevars:
                return f"the variable {name!r} of {function.__qualname__}"
            case types.FunctionType() as function if name in function.__code__.co_varnames:
                return f"the default {name!r} of {function.__qualname__}"
            case types.FunctionType() as function if name in function.__globals__:
                return f"the global {name} of {function.__module__}"
            case types.FunctionType():
                return f"{self.thing.__qualname__}.{name}"
            case type() | types.ModuleType():
                return f"{self.thing.__name__}.{name}"
            case nn.Module():
                return f"{type(self.thing).__name__}.{name}"
        return "the loss function's state" if self.parent is None else self.parent.label(self.name)

    def attribute(self, name: str) -> tuple[nn.Module | None, str]:
        """The module whose attribute leads to one of its contents, and that attribute; None without one."""
        if isinstance(self.thing, nn.Module):
            return self.thing, name
        if self.parent is None or isinstance(self.thing, type | types.FunctionType | types.ModuleType):
            return None, ""
        return self.parent.attribute(self.name)


@dataclass(eq=False)
class PythonState:
    """What a walk reaches.

    owners: what has contents, by path.  classes: those of objects, and those that code names.
    reads: the attributes that functions name, and their texts, for getattr.
    sets: the attributes, globals and variables that they set.
    caches: functions with a cache of ``functools``.
    objects: all that was looked at, by id, which stays theirs as long as this lives.
    """

    owners: dict[str, Owner] = field(default_factory=dict)
    classes: dict[type, None] = field(default_factory=dict)
    reads: set[str] = field(default_factory=lambda: {"forward"})
    sets: set[str] = field(default_factory=set)
    caches: list[Any] = field(default_factory=list)
    objects: dict[int, object] = field(default_factory=dict)
    _is_complete: bool = False
    _followed: set[str] = field(default_factory=lambda: {"forward"})  # names that code reads or sets
    _of_model: dict[int, Owner] = field(default_factory=dict)  # its modules
    _of_instances: set[type] = field(default_factory=set)
    _named: set[type] = field(default_factory=set)  # classes that code names
    _method_of: dict[int, type] = field(default_factory=dict)  # of these, by id
    _stored_by: dict[type, set[str]] = field(default_factory=dict)  # attributes that their methods set
    _waiting: dict[str, list[Owner]] = field(default_factory=dict)  # by a name that no function has
    _rest: list[Owner] = field(default_factory=list)  # what has no settings
    _todo: list[Owner] = field(default_factory=list)

    @staticmethod
    def of(model: nn.Module, loss_fn: object = None) -> PythonState:
        """What code reads by its names."""
        state = PythonState()
        state._of_model = {id(x): Owner(path, x, False) for path, x in model.named_modules()}
        for path, thing in (("", model), (LOSS, loss_fn)):
            state._follow(Owner(path, thing, True))
            state._visit_all()
        for cls, stored in state._stored_by.items():
            # Objects that the forward makes are gone after it: state is what the class itself has.
            state.sets |= stored if cls in state._of_instances else stored & set(dir(cls))
        return state

    @staticmethod
    def without_model(owners: Collection[Owner], reads: Collection[str], loss_fn: object) -> PythonState:
        """What the loss function reads, and what is left of a model that is gone: of its functions, their
        classes, and what these lead to.

        owners: what is left, classes as well.
        """
        state = PythonState(reads={*reads}, _followed={*reads})
        objects = [x for x in owners if not isinstance(x.thing, type)]
        state.owners |= {x.path: x for x in objects}
        state.objects |= {id(x.thing): x.thing for x in objects}
        for x in owners:
            state._hold(x.thing) if isinstance(x.thing, type) else state._enter(x)
        state._follow(Owner(LOSS, loss_fn, True))
        state._visit_all()
        return state

    @functools.cached_property
    def everything(self) -> PythonState:
        """This, and what code may make use of without its name: all attributes of objects, sets, arrays,
        long containers, hooks, and all methods of classes."""
        more = PythonState(*(copy.copy(getattr(self, x.name)) for x in fields(self)))
        more._is_complete, more._named, more._waiting, more._rest = True, set(), {}, []
        for cls in self.classes:
            more._name_class(cls)
        for entry in self._rest:
            more._follow(entry)
        for entry in chain(*self._waiting.values()):
            more._wait(entry)
        more._visit_all()
        return more

    def _visit_all(self) -> None:
        while self._todo:
            self._visit(self._todo.pop())

    def _visit(self, entry: Owner) -> None:
        thing = entry.thing
        if id(thing) in self.objects:
            return
        self.objects[id(thing)] = thing
        if self._is_complete and not keeps_state(thing):
            return
        if isinstance(thing, types.FunctionType):
            entry = replace(entry, path=self._free(name_and_line(thing)), is_far=False)
            self._read_names(thing)
        elif not isinstance(thing, (torch.Tensor, *OPTIMIZERS)):  # what their methods set is no state
            for cls in type(thing).__mro__:
                self._visit_class(cls)
        self._enter(self._of_model.get(id(thing), entry))

    def _enter(self, owner: Owner) -> None:
        """Follow what it holds."""
        thing, is_module = owner.thing, isinstance(owner.thing, nn.Module)
        is_far = owner.is_far and not isinstance(thing, (*CONTAINERS, *_OF_CONTEXTS))
        if owner.is_far != (is_far or isinstance(thing, OPTIMIZERS)):
            owner = replace(owner, is_far=not owner.is_far)
        if self.owners.get(owner.path, owner).thing is not thing:
            owner = replace(owner, path=self._free(owner.path))
        entries, rest = contents(thing), list[Owner]()
        if entries or not isinstance(thing, types.FunctionType):
            self.owners[owner.path] = owner
        for name, x in entries.items():
            if is_module and name in OF_MODULES:
                hooks = x.values() if "hooks" in name and isinstance(x, dict) else ()
                each = [Owner(owner.path, hook, True, owner, name) for hook in hooks]
                if name.startswith(("_forward", "_backward")):
                    for hook in each:
                        self._follow(hook)
                else:
                    rest += each
                continue
            entry = Owner(joined(owner.path, name), x, not is_module, owner, str(name))
            if owner.is_far:
                self._wait(entry)
            else:
                self._follow(entry)
        for name, x in tensors_by_kind(thing)[0].items() if is_module else ():
            for attribute in () if x is None else vars(x):
                self._wait(Owner(joined(owner.path, name), x, True, owner, attribute))
            for hook in () if x is None else gradient_hooks(x).values():
                self._follow(Owner(owner.path, hook, True, owner, name))
        if isinstance(thing, types.FunctionType):
            defaults = thing.__defaults__, thing.__kwdefaults__
            rest += [Owner(joined(owner.path, "defaults"), x, True, owner, "defaults") for x in defaults]
        if self._is_complete:
            for entry in rest:
                self._follow(entry)
        else:
            self._rest += rest

    def _free(self, path: str) -> str:
        """The path, with a number where another function of the same line has it."""
        numbers = (f"{path} #{number}" for number in count(2))
        return next(x for x in chain([path], numbers) if x not in self.owners)

    def _follow(self, entry: Owner) -> None:
        x = entry.thing
        if isinstance(x, nn.Module):
            if entry.is_far or id(x) not in self._of_model:  # else one of the model's in an attribute
                self._todo += (
                    replace(entry, path=joined(entry.path, below), thing=module, is_far=False)
                    for below, module in x.named_modules()
                )
        elif isinstance(x, types.MethodType):
            for bound in (x.__self__, x.__func__):
                self._follow(replace(entry, thing=bound, is_far=True))
        elif isinstance(x, type):
            for cls in inspect.getmro(x) + inspect.getmro(type(x)):
                self._name_class(cls)
        elif isinstance(x, _CACHED):
            self.caches.append(x)
            self._follow(replace(entry, thing=x.__wrapped__))
        elif isinstance(x, weakref.ref):
            self._follow(replace(entry, thing=x()))
        elif isinstance(x, types.FunctionType) or _has_settings(x, entry.is_far):
            self._todo.append(entry)
        elif not isinstance(x, VALUES):
            (self._todo if self._is_complete else self._rest).append(entry)
        for part in (x.func, x.args, x.keywords) if isinstance(x, functools.partial) else ():
            self._follow(replace(entry, thing=part, is_far=True))

    def _visit_class(self, cls: type) -> None:
        """Methods count once a function names them; those with special names are called without."""
        if cls in self._of_instances or not is_made(cls):
            return
        self._of_instances.add(cls)
        self._hold(cls)
        for name, function in _methods(cls):
            if name not in _OTHER_METHODS | _CONSTRUCTORS:
                entry = Owner(name, function, True, None, name)
                self._follow(entry) if name.startswith("__") else self._wait(entry)

    def _name_class(self, cls: type) -> None:
        """The forward may make objects of a class that its code names, and call its methods."""
        if cls in self._named or not is_made(cls) or not is_users(cls):
            return
        self._named.add(cls)
        self._hold(cls)
        if not (self._is_complete or _may_be_set(cls)):
            return
        of_autograd = _BY_AUTOGRAD if issubclass(cls, torch.autograd.Function) else ()
        # The modules of a model are there already, and their constructors read what the forward does not.
        is_there = issubclass(cls, nn.Module) and not self._is_complete
        others = _OTHER_METHODS | _CONSTRUCTORS if is_there else _OTHER_METHODS
        for name, function in _methods(cls):
            if name not in others:
                self._method_of[id(function)] = cls
                entry = Owner(name, function, True, None, name)
                is_called = name.startswith("__") or name in of_autograd
                self._follow(entry) if is_called else self._wait(entry)

    def _hold(self, cls: type) -> None:
        if cls not in self.classes:
            self.classes[cls] = None
            owner = Owner(class_path(cls), cls, True)
            for name, x in vars(cls).items():
                is_method = isinstance(function_of(x), types.FunctionType)
                if isinstance(x, type) or not (is_method or name.startswith("__")):
                    self._wait(Owner(joined(owner.path, name), x, True, owner, name))

    def _wait(self, entry: Owner) -> None:
        """Follow what is in an object once code has its name."""
        of_object = entry.parent is not None and not isinstance(entry.parent.thing, type | types.ModuleType)
        if entry.name in self._followed or (self._is_complete and of_object):
            self._follow(entry)
        else:
            self._waiting.setdefault(entry.name, []).append(entry)

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
        used = read | names.stored | {_setter(name) for name in names.stored}
        self._followed |= used
        if read & {"environ", "getenv"}:
            self._todo.append(Owner("os.environ", os.environ, True))
        package = function.__globals__.get("__package__") or ""
        for path in {x for name in names.modules for x in (name, joined(package, name))} & sys.modules.keys():
            if not _is_installed(path):
                self._follow(Owner(path, sys.modules[path], True))
        for name in used & self._waiting.keys():
            for entry in self._waiting.pop(name):
                self._follow(entry)


def _methods(cls: type) -> Iterator[tuple[str, object]]:
    """The functions of a class, by the names of their methods and properties; that which sets a property by
    another one, as code that reads it does not run that."""
    for name, x in vars(cls).items():
        functions = {name: function_of(x)}
        if isinstance(x, property):
            functions = {name: x.fget, _setter(name): x.fset}
        for each, function in functions.items():
            if isinstance(function, types.FunctionType | _CACHED):
                yield each, function


def _setter(name: str) -> str:
    return f"{name} ="


def _may_be_set(cls: type) -> bool:
    """Whether the methods of a class that code names may read what a script sets between steps.

    Libraries name hundreds of classes, of which a model makes few: those of installed packages count if they
    have numbers, or if autograd calls them.
    """
    numbers = (isinstance(x, int | float | torch.Tensor) for x in vars(cls).values())
    return not _is_installed(cls.__module__) or issubclass(cls, torch.autograd.Function) or any(numbers)


def _is_installed(module: str) -> bool:
    """Whether a module is of an installed package."""
    return (getattr(sys.modules.get(module), "__file__", None) or "").startswith(INSTALLED)


def _has_settings(x: object, is_far: bool) -> bool:
    """Objects that are far away have some if their class is a user's."""
    if isinstance(x, CONTAINERS):
        return len(x) <= _MOST_ENTRIES and not is_plain(x)
    if isinstance(x, _OF_CONTEXTS) or (isinstance(x, nn.Parameter) and vars(x)):
        return True
    if isinstance(x, (nn.Module, type, np.ndarray, *VALUES)):
        return False
    if is_far or isinstance(x, types.ModuleType):
        return isinstance(x, (*SETTINGS, *OPTIMIZERS)) or is_users(
            x if isinstance(x, types.ModuleType) else type(x)
        )
    return has_attributes(x) and (not callable(x) or is_users(type(x)))
