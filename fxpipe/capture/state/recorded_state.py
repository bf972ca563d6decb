"""Records the Python state that a model's code reaches, and puts it back."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from fxpipe.capture.state.state_slots import NamedPlaces, Opaque, State, differing, is_alike
from fxpipe.python_state.objects import (
    OF_MODULES,
    OPAQUE,
    VALUES,
    class_path,
    has_hidden_state,
    is_users,
    keeps_state,
    kind_of,
    slot_names,
)
from fxpipe.python_state.walk import Owner, PythonState
from fxpipe.runtime.functions import names_in

#: Maximum number of bytes of an array whose contents are recorded.
_LARGEST = 1 << 26
#: Iterators of which a copy does not share the position.
_ITERATORS: tuple[type, ...] = (itertools.count, *map(type, map(iter, ([], (), "", range(0)))))


@dataclass(eq=False)
class RecordedState:
    """The state that a model and its loss function reach, as it is when this is made.

    ``objects``: all that the walk looked at, by id, which stays theirs.
    ``is_whole``: whether all code is that of installed packages, and all objects' state is recorded.
    ``at_begin``, ``between``: the state when the trace begins, and between two runs of the forward.
    """

    states: list[State] = field(default_factory=list)
    caches: list[tuple[Any, int]] = field(default_factory=list)  # each with its number of misses
    objects: dict[int, object] = field(default_factory=dict)
    is_whole: bool = True
    at_begin: list[object] = field(default_factory=list)
    between: list[object] = field(default_factory=list)
    _set_again: dict[str, set[str]] = field(default_factory=dict)

    @staticmethod
    def of(walked: PythonState) -> RecordedState:
        everything = walked.everything
        classes = (Owner(class_path(cls), cls, True) for cls in everything.classes)
        owners = [x for x in (*everything.owners.values(), *classes) if keeps_state(x.thing)]
        return RecordedState(
            [State.of(place, owner) for owner in owners for place in _places(owner.thing)],
            [(function, function.cache_info().misses) for function in everything.caches],
            everything.objects,
            not any(map(has_hidden_state, everything.objects.values())),
        )

    def name_of(self, thing: object) -> str:
        """What leads to an object, for messages; "" if no place of state has it."""
        for state in self.states:
            for key, x in state.entries():
                if x is thing:
                    return state.called(key)
        return ""

    def put_in_place(self, replaced: Callable[[object], object]) -> None:
        """Put other objects into the entries of dicts, lists and names; None leaves an entry as it is."""
        for state in self.states:
            if isinstance(state.place, (dict, list, deque, NamedPlaces)):
                for key, x in state.entries():
                    new = copy.copy(x) if isinstance(x, _ITERATORS) else replaced(x)
                    if new is not None:
                        state.place[key] = new

    def begin(self) -> None:
        """Note the state with which the trace begins."""
        self.at_begin = [state.now() for state in self.states]

    def begin_again(self) -> None:
        """Note the state with which the forward runs once more."""
        self.between = [state.now() for state in self.states]

    def is_changed(self) -> bool:
        """Whether some state is another one than when the trace began."""
        pairs = zip(self.states, self.at_begin, strict=True)
        return any(not is_alike(state.now(), before) for state, before in pairs)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note for ``stored`` what a block sets of modules."""
        sets = nn.Module.__setattr__

        def noted(module: nn.Module, name: str, value: Any) -> None:
            self._set_again.setdefault(kind_of(module), set()).add(name)
            sets(module, name, value)

        with mock.patch.object(nn.Module, "__setattr__", noted):
            yield

    def stored(self) -> dict[str, set[str]]:
        """The attributes, globals and variables that the forward has set in this trace, by ``kind_of`` what
        has them; of modules also those that got the value that they had."""
        stored = {kind: {*names} for kind, names in self._set_again.items()}
        now = [state.now() for state in self.states]
        for then, later in pairwise(filter(None, (self.at_begin, self.between, now))):
            for state, a, b in zip(self.states, then, later, strict=True):
                if isinstance(a, dict) and (names := differing(a, b)):
                    variable = getattr(state.place, "variable", "")
                    stored.setdefault(kind_of(state.owner.thing), set()).update(
                        [variable] if variable else names
                    )
        return stored

    def new_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that places of state have got since, with their names for messages."""
        seen = set(self.objects)  # what is new in these is new in their own places
        for state in self.states:
            now: Any = state.now()
            if isinstance(now, bytes):  # of an array, or a generator
                continue
            for key, x in now.items() if isinstance(now, dict) else enumerate(now):
                if not isinstance(state.before, dict) or state.before.get(key) is not x:
                    yield from ((state.called(key), tensor) for tensor in _tensors_in(x, seen))

    def restore(self) -> None:
        for state in self.states:
            state.restore()
        for function, misses in self.caches:
            if function.cache_info().misses != misses:
                function.cache_clear()  # it may hold fake tensors


def _places(thing: object) -> Iterator[object]:
    """The places of state in an object."""
    if isinstance(thing, (dict, list, set, deque)):
        yield thing
    elif isinstance(thing, OPAQUE):
        is_large = isinstance(thing, np.ndarray) and (thing.nbytes > _LARGEST or thing.dtype.hasobject)
        if not is_large and not isinstance(thing, random.SystemRandom):  # which has no state
            yield Opaque(thing)
    elif isinstance(thing, ContextVar | type):
        yield NamedPlaces(thing, ())
    elif isinstance(thing, types.ModuleType):
        yield NamedPlaces(vars(thing), tuple(vars(thing)))
    elif isinstance(thing, types.FunctionType):
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False):
            yield NamedPlaces(cell, ("cell_contents",), name)
        yield NamedPlaces(thing.__globals__, tuple(sorted(names_in(thing.__code__).globals)))
        yield thing.__dict__
    else:
        if type(thing).__dictoffset__ or isinstance(thing, threading.local):  # others may answer to any name
            yield thing.__dict__
        if slots := tuple(slot_names(type(thing))):
            yield NamedPlaces(thing, slots)
    if isinstance(thing, nn.Module):
        yield from (x for name, x in vars(thing).items() if name in OF_MODULES and isinstance(x, dict | set))


def _tensors_in(thing: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in a thing, but for objects that have been seen, to which it adds."""
    todo = [thing]
    while todo:
        x = todo.pop()
        if isinstance(x, torch.Tensor):
            yield x
        elif id(x) not in seen and not isinstance(x, (*VALUES, type, types.ModuleType)):
            seen.add(id(x))
            if isinstance(x, dict):
                todo += x.values()
            elif isinstance(x, (list, tuple, set, deque)):
                todo += x
            elif isinstance(x, nn.Module) or is_users(type(x)):
                todo += vars(x).values() if type(x).__dictoffset__ else ()
