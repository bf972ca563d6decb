"""Records the Python state that a model's code reaches, and puts it back.

The search begins at the model and its loss function.  It follows attributes (also of ``__slots__``),
containers, attributes of classes, variables of closures, and the globals that a function names, through code
that belongs neither to torch nor to the standard library.
"""

from __future__ import annotations

import argparse
import array
import contextvars
import copy
import functools
import itertools
import queue
import random
import sys
import sysconfig
import threading
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, MutableMapping, MutableSequence, MutableSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from fxpipe.capture.state.state_slots import NamedPlaces, Opaque, State, read_place
from fxpipe.runtime.functions import CodeNames, names_in

CONTAINERS = (dict, list, set, deque)
_VALUES = (str, bytes, int, float, complex, torch.Tensor, torch.dtype, torch.device, type(None))
#: What has a state of its own beside attributes.
_OPAQUE = (np.ndarray, random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
#: Of the standard library, what keeps things in attributes: containers in Python, and names for any use.
_KEEPERS = (
    MutableMapping, MutableSequence, MutableSet,
    types.SimpleNamespace, argparse.Namespace, threading.local, functools.partial, queue.Queue,
)  # fmt: skip
#: Packages whose classes and functions keep no state of a model.
_OTHERS = frozenset({*sys.stdlib_module_names, "torch", "sympy", "numpy", "fxpipe", ""}) - {"__main__"}
#: Methods that code calls without their names.
_CALLED = {
    f"__{name}__"
    for name in (
        "init", "call", "enter", "exit", "iter", "next", "bool", "len", "contains", "getattr", "getitem",
        "setitem", "add", "radd", "iadd", "sub", "mul", "rmul", "imul", "truediv", "float", "int", "index",
    )
}  # fmt: skip
#: Maximum number of bytes of an array whose contents are recorded.
LARGEST = 1 << 26
#: Iterators of which a copy does not share the position.
_ITERATORS: tuple[type, ...] = (itertools.count, *map(type, map(iter, ([], (), "", range(0)))))
#: Where installed packages are.
_INSTALLED = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, "<")
#: Types of values that are compared rather than identified.
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(eq=False)
class Snapshot:
    """The state that a model and its loss function reach.

    ``caches``: functions with a cache of ``functools``, each with its number of misses.
    ``is_whole``: whether all code is that of installed packages, and all objects' state is recorded.
    """

    states: list[State]
    caches: list[tuple[Any, int]]
    is_whole: bool = True
    reached: dict[int, Any] = field(default_factory=dict)  # all objects by id, which stays theirs
    lent: list[Any] = field(default_factory=list)  # the contents when the trace begins
    between: list[Any] = field(default_factory=list)  # those between two runs of the forward

    @staticmethod
    def of(model: nn.Module, loss_fn: Any = None) -> Snapshot:
        paths = {id(module): path for path, module in model.named_modules()}
        snapshot = Snapshot([], [])
        seen = snapshot.reached
        used: set[str] = {"forward"}  # attributes that the functions found name
        waiting: dict[str, list[_Found]] = {}  # methods, by a name that is not among them
        todo = [_Found(loss_fn, "the loss function's state"), _Found(model, "")]
        while todo:
            found = todo.pop()
            thing = found.thing
            if isinstance(thing, _VALUES) or id(thing) in seen:
                continue
            seen[id(thing)] = thing
            if isinstance(thing, nn.Module):
                path = paths.get(id(thing))
                name = f"{path}.*" if path else "the model's *" if path == "" else f"{type(thing).__name__}.*"
                found = _Found(thing, name, thing)
            if _has_hidden_state(thing):
                snapshot.is_whole = False
            names = CodeNames(set(), set(), set(), set(), set())
            if isinstance(thing, types.FunctionType) and _is_users(thing):
                names = names_in(thing.__code__)
                for name in sorted((names.attributes | names.stored) - used):
                    used.add(name)
                    todo += waiting.pop(name, ())
            for place, label in _places(found, names.globals):
                before = read_place(place)
                snapshot.states.append(State(place, before, label, found.owner, found.attribute))
                entries = before.items() if isinstance(before, dict) else ((None, x) for x in before or ())
                for key, x in () if isinstance(before, bytes) else entries:
                    entry = found.entry(key, x, label)
                    if isinstance(thing, (type, types.ModuleType)) and key not in used:
                        waiting.setdefault(str(key), []).append(entry)
                    elif not isinstance(x, _VALUES):
                        todo.append(entry)
            todo += _parts(found)
            if isinstance(thing, functools._lru_cache_wrapper):
                snapshot.caches.append((thing, thing.cache_info().misses))
        return snapshot

    def name_of(self, thing: Any) -> str:
        """What leads to an object, for messages; "" if no place of state has it."""
        for state in self.states:
            entries = state.before.items() if isinstance(state.before, dict) else enumerate(state.before)
            for key, x in entries:
                if x is thing:
                    return state.called(key)
        return ""

    def put_in_place(self, replaced: Callable[[Any], Any]) -> None:
        """Put other objects into the entries of dicts, lists and names; None leaves an entry as it is."""
        for state in self.states:
            if isinstance(state.place, (dict, list, deque, NamedPlaces)):
                before = state.before
                entries: Any = before.items() if isinstance(before, dict) else enumerate(before)
                for key, x in entries:
                    new = copy.copy(x) if isinstance(x, _ITERATORS) else replaced(x)
                    if new is not None:
                        state.place[key] = new

    def begin(self) -> None:
        """Note the state with which the trace begins."""
        self.lent = [state.now() for state in self.states]

    def begin_again(self) -> None:
        """Note the state with which the forward runs once more."""
        self.between = [state.now() for state in self.states]

    def is_changed(self) -> bool:
        """Whether some state is another one than when the trace began."""
        return any(not _alike(state.now(), old) for state, old in zip(self.states, self.lent, strict=True))

    def new_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that places of state have got since, with their names for messages."""
        seen = set(self.reached)  # what is new in these is new in their own places
        for state in self.states:
            now: Any = state.now()
            if isinstance(now, bytes):  # of an array, or a generator
                continue
            for key, x in now.items() if isinstance(now, dict) else enumerate(now):
                if not isinstance(state.before, dict) or state.before.get(key) is not x:
                    yield from ((state.called(key), found) for found in _tensors_in(x, seen))

    def restore(self) -> None:
        for state in self.states:
            state.restore()
        for function, misses in self.caches:
            if function.cache_info().misses != misses:
                function.cache_clear()  # it may hold fake tensors


@dataclass(frozen=True, eq=False)
class _Found:
    """An object that the search reaches; ``label``, ``owner`` and ``attribute`` as in ``State``."""

    thing: Any
    label: str
    owner: nn.Module | None = None
    attribute: str = ""

    def entry(self, key: Any, x: Any, label: str) -> _Found:
        if self.owner is not None and label == self.label and key in ("_parameters", "_buffers"):
            return _Found(x, label, self.owner)  # its keys are attributes as well
        attribute = self.attribute or str(key)
        named = str(key) if self.owner is None else attribute
        return _Found(x, label.replace("*", named), self.owner, attribute)


def _places(found: _Found, globals_: Collection[str]) -> Iterator[tuple[Any, str]]:
    """The places of state in an object, with their labels.  globals_: those that a function names."""
    thing, label = found.thing, found.label
    if isinstance(thing, CONTAINERS):
        yield thing, label
    elif isinstance(thing, _OPAQUE) and not isinstance(thing, random.SystemRandom):  # which has no state
        if not isinstance(thing, np.ndarray) or (thing.nbytes <= LARGEST and not thing.dtype.hasobject):
            yield Opaque(thing), label
    elif isinstance(thing, contextvars.ContextVar):
        yield NamedPlaces(thing, ()), label
    elif isinstance(thing, types.ModuleType):
        if _is_users(thing):
            yield NamedPlaces(vars(thing), tuple(vars(thing))), f"{thing.__name__}.*"
    elif isinstance(thing, type):
        if _is_users(thing):
            yield NamedPlaces(thing, ()), f"{thing.__name__}.*"
    elif isinstance(thing, types.FunctionType):
        if _is_users(thing):
            for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False):
                yield NamedPlaces(cell, ("cell_contents",)), f"the variable {name!r} of {thing.__qualname__}"
            yield (
                NamedPlaces(thing.__globals__, tuple(sorted(globals_))),
                f"the global * of {thing.__module__}",
            )
            yield thing.__dict__, f"{thing.__qualname__}.*"
    elif isinstance(thing, (nn.Module, *_KEEPERS)) or _is_users(type(thing)):
        if type(thing).__dictoffset__ or isinstance(thing, threading.local):  # others may answer to any name
            yield thing.__dict__, label
        slots = tuple(_slots(type(thing)))
        if slots:
            yield NamedPlaces(thing, slots), label


def _parts(found: _Found) -> list[_Found]:
    """What an object refers to beside its places of state."""
    thing, label = found.thing, found.label
    match thing:
        case tuple() | frozenset():
            return [_Found(x, label, found.owner, found.attribute) for x in thing]
        case functools.partial():
            return [_Found(x, label) for x in (thing.func, thing.args, thing.keywords)]
        case types.MethodType():
            return [_Found(thing.__self__, label), _Found(thing.__func__, label)]
        case staticmethod() | classmethod():
            return [_Found(thing.__func__, label)]
        case property():
            return [_Found(x, label) for x in (thing.fget, thing.fset)]
        case type():
            if not _is_users(thing):
                return []
            special = [x for k, x in vars(thing).items() if k in _CALLED]
            return [_Found(x, label) for x in (*thing.__mro__[1:], *special)]
        case types.FunctionType():
            defaults = thing.__defaults__, thing.__kwdefaults__
            return (
                [_Found(x, f"a default of {thing.__qualname__}") for x in defaults]
                if _is_users(thing)
                else []
            )
    wrapped = getattr(thing, "__wrapped__", None) if isinstance(thing, functools._lru_cache_wrapper) else None
    return [_Found(type(thing), label), _Found(wrapped, label)]


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return [*a] == [*b] and all(_same(x, b[key]) for key, x in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)  # sets and bytes


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b)


def _has_hidden_state(thing: Any) -> bool:
    """Whether an object has state that is not recorded, or is code outside of installed packages."""
    if isinstance(thing, types.FunctionType):
        return _is_users(thing) and not thing.__code__.co_filename.startswith(_INSTALLED)
    return isinstance(thing, (Iterator, threading.local, bytearray, array.array))


def _tensors_in(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Those in a thing, but for objects that have been seen, to which it adds."""
    todo = [thing]
    while todo:
        x = todo.pop()
        if isinstance(x, torch.Tensor):
            yield x
        elif id(x) not in seen and not isinstance(x, (*_VALUES, type, types.ModuleType)):
            seen.add(id(x))
            if isinstance(x, dict):
                todo += x.values()
            elif isinstance(x, (list, tuple, set, deque)):
                todo += x
            elif isinstance(x, nn.Module) or _is_users(type(x)):
                todo += vars(x).values() if type(x).__dictoffset__ else ()


def _is_users(code: Any) -> bool:
    """Whether a class or function belongs neither to torch nor to the standard library."""
    name = code.__name__ if isinstance(code, types.ModuleType) else getattr(code, "__module__", "")
    return str(name).partition(".")[0] not in _OTHERS


def _slots(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        if _is_users(base):
            slots = vars(base).get("__slots__", ())
            yield from (x for x in ([slots] if isinstance(slots, str) else slots) if not x.startswith("__"))
