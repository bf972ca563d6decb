"""Tells in a fraction of a millisecond whether all owners hold the same objects as before.

In nearly all steps they do.  Lists of the objects' addresses tell it, which builtin functions make and
compare without a line of Python for each owner.  A global is read once for all functions that name it.  An
address is that of the same object as long as this has not been freed, which weak references tell.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, repeat
from operator import attrgetter, call, is_, itemgetter, methodcaller, ne
from typing import Any

from torch import nn

from fxpipe.python_state.objects import has_only_attributes, is_plain
from fxpipe.runtime.functions import names_in
from fxpipe.training.guards.guard_slots import GuardSlots, ids, strong

_DICT, _GLOBALS, _CODE = attrgetter("__dict__"), attrgetter("__globals__"), attrgetter("__code__")
_DEFAULTS, _CLOSURE = attrgetter("__defaults__"), attrgetter("__closure__")
_TABLES = itemgetter("_parameters", "_buffers", "_modules")
_CELL, _ENTRIES = attrgetter("cell_contents"), methodcaller("values")
_flat = chain.from_iterable
Owners = dict[int, Any]
"""By place: the number of their slots in the list of all."""


@dataclass(eq=False)
class _Column:
    """Addresses that are read together.

    places: of the owners of each address; where these are not as many, any address may be of any owner.
    """

    read: Callable[[], list[Any]]
    places: Sequence[Sequence[int]]
    before: list[object] = field(init=False)

    def __post_init__(self) -> None:
        self.before = self.now = self.read()

    def changed(self) -> Iterable[int]:
        try:
            self.now = self.read()
        except (AttributeError, KeyError, ValueError):  # a name, or the value of a variable, is gone
            self.now = []
        if self.now == self.before:
            return ()
        if len(self.now) == len(self.before) == len(self.places):
            return _flat(compress(self.places, map(ne, self.now, self.before)))
        return _flat(self.places)


class ComparedIds:
    """The addresses of what owners hold when this is made."""

    def __init__(self, slots: Sequence[GuardSlots]):
        self._slots = [*slots]
        self._freed: list[object] = []
        self._alive = [self._ref(strong(x)) for each in slots for x in each.objects.values()]
        self._defaults: list[object] = []  # whose addresses no others may take
        kinds: dict[Callable[[Owners], Iterable[_Column]], Owners] = {}
        for place, each in enumerate(slots):
            owner = strong(each.owner)
            kinds.setdefault(self._kind(owner, each), {})[place] = owner
        self._columns = [column for kind, owners in kinds.items() for column in kind(owners)]
        self._columns.append(self._values())

    def changed(self) -> Sequence[int]:
        """The places of owners that may have other objects or values now."""
        if self._freed:
            return range(len(self._slots))
        return sorted({place for column in self._columns for place in column.changed()})

    def accepted(self, slots: Sequence[GuardSlots]) -> ComparedIds:
        """The addresses of what the owners of these slots hold, which were made since ``changed`` ran."""
        same = len(slots) == len(self._slots) and all(map(GuardSlots.is_like, slots, self._slots))
        if self._freed or not same:
            return ComparedIds(slots)
        self._slots = [*slots]
        for column in self._columns:
            column.before = column.now
        return self

    def _ref(self, x: object) -> Any:
        """A weak reference that tells when the object is freed; the object itself if it cannot have one."""
        try:
            return weakref.ref(x, self._freed.append)
        except TypeError:
            return x

    def _kind(self, owner: Any, slots: GuardSlots) -> Callable[[Owners], Iterable[_Column]]:
        """The method that makes the columns of an owner and of those like it."""
        if isinstance(owner, tuple):
            return self._of_tuples
        if slots.constants or not isinstance(slots.owner, weakref.ref):
            return self._of_others
        if isinstance(owner, types.FunctionType):
            has_all = {*owner.__code__.co_freevars} <= {*slots.names} and not owner.__kwdefaults__
            return self._of_functions if has_all else self._of_others
        return self._of_objects if has_only_attributes(owner) else self._of_others

    def _of_objects(self, owners: Owners) -> Iterable[_Column]:
        """Read of modules, objects and classes their class, the number of their attributes, and these; of
        modules their submodules, and which parameters and buffers are None, as programs read them now."""
        modules = {place: x for place, x in owners.items() if isinstance(x, nn.Module)}
        owners = modules | owners  # these are the first
        refs, number = [*map(self._ref, owners.values())], len(modules)
        names = [[x for x in self._slots[place].names if x in vars(owner)] for place, owner in owners.items()]
        entries = _getters(names)

        def read() -> list[object]:
            objects = [*map(call, refs)]
            dicts = [*map(_DICT, objects)]
            parameters, buffers, children = _tables(dicts[:number])
            return [
                *map(id, map(type, objects)),
                *map(len, dicts),
                *map(id, entries(dicts)),
                *map(len, chain(parameters, buffers, children)),
                *map(is_, _flat(map(dict.values, filter(None, chain(parameters, buffers)))), repeat(None)),
                *map(id, _flat(map(dict.values, filter(None, children)))),
            ]

        each, of_modules = [*zip(owners)], [*zip(modules)]
        tables = (_repeated(of_modules, x) for x in _tables([vars(x) for x in modules.values()]))
        yield _Column(read, [*each, *each, *_repeated(each, names), *of_modules * 3, *_flat(tables)])

    def _of_functions(self, owners: Owners) -> Iterable[_Column]:
        """Read their code and defaults, attributes, the variables of their closures, and globals."""
        functions, each = [*owners.values()], [*zip(owners)]
        refs = [*map(self._ref, functions)]
        self._defaults += (x.__defaults__ for x in functions if is_plain(x.__defaults__))

        def read() -> list[object]:
            now = [*map(call, refs)]
            attributes = _flat(map(dict.values, filter(None, map(_DICT, now))))
            variables = map(_CELL, _flat(filter(None, map(_CLOSURE, now))))
            return [*map(_CODE, now), *map(id, chain(map(_DEFAULTS, now), attributes, variables))]

        attributes = _repeated(each, [vars(x) for x in functions])
        variables = _repeated(each, [x.__closure__ or () for x in functions])
        yield _Column(read, [*each, *each, *attributes, *variables])
        places: dict[int, dict[str, list[int]]] = {}  # that name a global, by namespace and name
        one_of_each: dict[int, Any] = {}
        for place, function in owners.items():
            namespace = function.__globals__
            one_of_each.setdefault(id(namespace), self._ref(function))
            by_name = places.setdefault(id(namespace), {})
            for name in names_in(function.__code__).globals.intersection(self._slots[place].names, namespace):
                by_name.setdefault(name, []).append(place)
        entries, refs_of_each = _getters([[*x] for x in places.values()]), [*one_of_each.values()]
        yield _Column(
            lambda: [*map(id, entries(map(_GLOBALS, map(call, refs_of_each))))],
            [x for by_name in places.values() for x in by_name.values()],
        )

    def _of_others(self, owners: Owners) -> Iterable[_Column]:
        """Read containers, and objects that hold more than attributes."""
        refs = [(self._slots[place], self._ref(x)) for place, x in owners.items()]
        yield _Column(lambda: [ids(slots, strong(ref)) for slots, ref in refs], [*zip(owners)])

    def _of_tuples(self, _: Owners) -> Iterable[_Column]:
        """Read none: what holds a tuple would hold another one."""
        return ()

    def _values(self) -> _Column:
        """Read what can change in place."""
        things = [(place, x) for place, each in enumerate(self._slots) for x, _ in each.by_value]
        return _Column(
            lambda: [self._slots[place].compared.value(strong(x)) for place, x in things],
            [(place,) for place, _ in things],
        )


def _getters(names: Iterable[Sequence[object]]) -> Callable[[Iterable[object]], Iterator[object]]:
    """A function that gives the entries of these names of dicts, one dict after the other."""
    getters = [_getter(x) for x in names]
    return lambda dicts: _flat(map(call, getters, dicts))


def _getter(names: Sequence[object]) -> Callable[[Any], Iterable[object]]:
    if len(names) > 1:
        return itemgetter(*names)
    return (lambda entries: (entries[names[0]],)) if names else lambda _: ()


def _repeated(places: Sequence[object], contents: Iterable[Sequence[object]]) -> Iterable[Any]:
    """Each place as often as it has contents."""
    return _flat(map(repeat, places, map(len, contents)))


def _tables(dicts: Sequence[Any]) -> Iterable[Sequence[Any]]:
    """The parameters, buffers and submodules of modules."""
    return zip(*map(_TABLES, dicts), strict=True) if dicts else ((), (), ())
