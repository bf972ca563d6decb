"""The places of Python state: containers, attributes, arrays and generators, and their contents,
which are recorded and put back."""

from __future__ import annotations

import contextlib
import contextvars
import random
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fxpipe.ir.compat import no_modes
from fxpipe.python_state.objects import PLAIN
from fxpipe.python_state.walk import Owner

_ABSENT: object = object()


@dataclass(frozen=True, eq=False)
class NamedPlaces:
    """Some attributes of an object, a class or a cell, or some globals, as one container.

    variable: the name of a cell.
    """

    of: object
    names: tuple[str, ...]
    variable: str = ""

    def read(self) -> dict[str, object]:
        if isinstance(self.of, dict):
            return {name: self.of[name] for name in self.names if name in self.of}
        if isinstance(self.of, type):
            return {name: x for name, x in vars(self.of).items() if not name.startswith("__")}
        if isinstance(self.of, contextvars.ContextVar):
            value = self.of.get(_ABSENT)
            return {} if value is _ABSENT else {"value": value}
        values = {}
        for name in self.names:
            with contextlib.suppress(AttributeError, ValueError):  # ValueError: a variable without a value
                values[name] = getattr(self.of, name)
        return values

    def __setitem__(self, name: str, value: object) -> None:
        if isinstance(self.of, dict):
            self.of[name] = value
        elif isinstance(self.of, contextvars.ContextVar):
            self.of.set(value)
        else:
            setattr(self.of, name, value)

    def __delitem__(self, name: str) -> None:
        if isinstance(self.of, dict):
            del self.of[name]
        elif not isinstance(self.of, contextvars.ContextVar):  # which cannot lose its value
            delattr(self.of, name)


class Opaque:
    """An array, or a generator of random numbers, with its contents when this is made."""

    def __init__(self, of: Any):
        self.of, self._before = of, _contents(of)

    def read(self) -> bytes:
        return _bytes(_contents(self.of))

    def restore(self) -> None:
        match self.of:
            case np.ndarray():
                self.of[...] = self._before
            case random.Random():
                self.of.setstate(self._before)
            case np.random.Generator():
                self.of.bit_generator.state = self._before
            case _:
                self.of.set_state(self._before)


@dataclass(frozen=True, eq=False)
class State:
    """The contents of one place before the trace.

    place: a dict, list, set or deque, ``NamedPlaces`` or ``Opaque``.
    owner: the object that the place is in.
    """

    place: object
    before: Any
    owner: Owner

    @staticmethod
    def of(place: object, owner: Owner) -> State:
        return State(place, read_place(place), owner)

    def now(self) -> Any:
        return read_place(self.place)

    def entries(self) -> Iterable[tuple[Any, object]]:
        """The contents, by name, key or index; an array has none."""
        if isinstance(self.before, bytes):
            return ()
        return self.before.items() if isinstance(self.before, dict) else enumerate(self.before)

    def called(self, key: object = "") -> str:
        """An entry's name for messages."""
        return self.owner.label(getattr(self.place, "variable", "") or str(key))

    def attribute(self, key: object) -> tuple[nn.Module | None, str]:
        """The module whose attribute leads to an entry, and that attribute; None without one."""
        return self.owner.attribute(str(key))

    def restore(self) -> None:
        _put_back(self.place, self.before)


def _contents(opaque: Any) -> Any:
    match opaque:
        case np.ndarray():
            return opaque.copy()
        case random.Random():
            return opaque.getstate()
        case np.random.Generator():
            return opaque.bit_generator.state
        case np.random.RandomState():
            return opaque.get_state(legacy=False)
        case _:
            return opaque.get_state()


def _bytes(contents: object) -> bytes:
    match contents:
        case np.ndarray():
            return contents.tobytes()
        case torch.Tensor():
            with no_modes():
                return bytes(contents.numpy())
        case dict():
            return b"".join(map(_bytes, contents.values()))
        case _:
            return repr(contents).encode()


def read_place(place: Any) -> Any:
    if type(place) is dict:  # most of them: attributes
        return place.copy()
    # A subclass of dict or list may have a constructor and methods of its own: only its contents are kept.
    match place:
        case NamedPlaces() | Opaque():
            return place.read()
        case dict():
            return dict(_base(place).items(place))
        case set():
            return set(place)
        case _:
            return list(place)


def is_alike(a: object, b: Any) -> bool:
    """Whether the contents of a place are the same objects, or plain values that are equal."""
    if isinstance(a, dict):
        return [*a] == [*b] and all(_is_same(x, b[key]) for key, x in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b)  # sets and bytes


def differing(a: dict[object, object], b: dict[object, object]) -> set[str]:
    """The keys under which two places have other contents."""
    return {str(key) for key in {*a, *b} if not _is_same(a.get(key, _ABSENT), b.get(key, _ABSENT))}


def _is_same(a: object, b: object) -> bool:
    """A number of the data (``NumberOfData``) is of no plain type, whatever it says."""
    return a is b or (issubclass(type(a), PLAIN) and type(a) is type(b) and bool(a == b))


def _base(place: dict[object, object]) -> type[dict[object, object]]:
    """The class whose methods read and write a dict: those of other classes may import what it names."""
    return OrderedDict if isinstance(place, OrderedDict) else dict


def _put_back(place: Any, before: Any) -> None:
    match place:
        case NamedPlaces():
            now = place.read()
            for name, value in before.items():
                if value is not now.get(name, _ABSENT):
                    place[name] = value
            for name in now.keys() - before.keys():
                del place[name]
        case Opaque():
            if place.read() != before:
                place.restore()
        case dict():
            base, now = _base(place), read_place(place)
            if [*now] != [*before]:
                base.clear(place)
                now = {}
            for key, value in before.items():
                if now.get(key, _ABSENT) is not value:
                    base.__setitem__(place, key, value)
        case set():
            if place != before:
                place.clear()
                place |= before
        case _:
            if len(place) != len(before) or any(a is not b for a, b in zip(place, before, strict=True)):
                place.clear()
                place.extend(before)
