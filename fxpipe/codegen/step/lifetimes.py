"""Writes the values in the functions of a step such that each is freed behind its last reader.

A value that its function alone uses is a local variable.  Every other one is in a dict by microbatch, out
of which its last reader takes it: ``h.pop(m)``.  If two readers come in either order, depending on the
microbatch, each of them takes one of two references: ``h[m].pop()``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from fxpipe.codegen.step.instruction_text import Hole, Line, Use
from fxpipe.plan.program.verbs import VERBS


@dataclass(frozen=True, eq=False)
class OpFunction:
    """A function of a step.  ``parameters``: beside the microbatch."""

    name: str
    doc: str
    parameters: tuple[str, ...]
    lines: tuple[Line, ...]


_Place = tuple[OpFunction, int, int]
"""A function, a line of it, and the place in the line."""


@dataclass(frozen=True)
class Lifetimes:
    """``local``: values with the only function that uses them.  ``last``: the readers behind which a value
    is free, for every microbatch.  ``shared``: values whose last reader is not always the same, with the
    number of readers.
    """

    local: frozenset[tuple[OpFunction, str]]
    last: frozenset[_Place]
    shared: dict[str, int]

    def written(self, function: OpFunction) -> list[str]:
        """The lines of a function."""
        lines = []
        for number, line in enumerate(function.lines):
            lines.append("".join(self._part(function, number, k, part) for k, part in enumerate(line)))
            gives = [part.name for part in line if isinstance(part, Hole) and part.use is Use.GIVE]
            for name in (name for name in gives if name in self.shared):
                readers = self.shared[name]
                lines.append(f"{name}[m] = [{name}[m]] * {readers}  # one for each reader, in any order")
            dead = dict.fromkeys(
                part.name
                for k, part in enumerate(line)
                if isinstance(part, Hole)
                and (function, part.name) in self.local
                and (function, number, k) in self.last
            )
            if dead and any(map(_takes_memory, function.lines[number + 1 :])):
                lines.append(f"del {', '.join(dead)}")
        return lines

    def _part(self, function: OpFunction, line: int, place: int, part: str | Hole) -> str:
        if isinstance(part, str):
            return part
        if (function, part.name) in self.local:
            return part.name
        if part.use is not Use.READ:
            return f"{part.name}[m]"
        if part.name in self.shared:
            return f"{part.name}[m].pop()"
        return f"{part.name}.pop(m)" if (function, line, place) in self.last else f"{part.name}[m]"


def _takes_memory(line: Line) -> bool:
    """Not a line that hands on what is there; the function's end frees its variables soon enough."""
    called = str(line[0]).partition("(")[0]
    return not called.startswith("rt.") or VERBS[called.removeprefix("rt.")].takes_memory


def lifetimes(orders: Iterable[tuple[OpFunction, ...]]) -> Lifetimes:
    """orders: the functions that run for a microbatch in their order, for each microbatch; once if equal.

    A value is given and read for one microbatch.
    """
    local: dict[tuple[OpFunction, str], bool] = {}
    ends: defaultdict[_Place, set[bool]] = defaultdict(set)
    shared: dict[str, int] = {}
    for order in orders:
        readers, pending = _places(order, Use.READ), _places(order, Use.PENDING)
        for name, ((giver, *_), *_) in _places(order, Use.GIVE).items():
            alone = name not in pending and all(reader is giver for reader, *_ in readers.get(name, ()))
            local[giver, name] = alone and local.get((giver, name), True)
        for name, places in readers.items():
            for place in places:
                ends[place].add(place == places[-1])
                if len(ends[place]) == 2:  # the last reader of some microbatches alone
                    shared[name] = len(places)
    return Lifetimes(
        frozenset(key for key, alone in local.items() if alone),
        frozenset(place for place, ended in ends.items() if ended == {True}),
        shared,
    )


def _places(order: Iterable[OpFunction], use: Use) -> dict[str, list[_Place]]:
    """Map a name to the places with such a use of the value, in their order."""
    places: defaultdict[str, list[_Place]] = defaultdict(list)
    for function in order:
        for number, line in enumerate(function.lines):
            for k, part in enumerate(line):
                if isinstance(part, Hole) and part.use is use:
                    places[part.name].append((function, number, k))
    return places
