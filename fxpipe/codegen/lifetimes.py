"""Writes the values in the functions of a step such that each is freed behind its last reader.

A value that its function alone uses is a local variable.  Every other one is in a dict by microbatch, out
of which its last reader takes it: ``h.pop(m)``.  If two readers come in either order, depending on the
microbatch, each of them takes one of two references: ``h[m].pop()``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from fxpipe.codegen.lines import Hole, Line, Use


@dataclass(frozen=True, eq=False)
class Function:
    """A function of a step.  ``parameters``: beside the microbatch."""

    name: str
    doc: str
    parameters: tuple[str, ...]
    lines: tuple[Line, ...]


_Reader = tuple[Function, int, int]
"""A function, a line of it, and the place in the line."""


@dataclass(frozen=True)
class Lifetimes:
    """``local``: values with the only function that uses them.  ``last``: the readers behind which a value
    is free, for every microbatch.  ``shared``: values whose last reader is not always the same, with the
    number of readers.
    """

    local: frozenset[tuple[Function, str]]
    last: frozenset[_Reader]
    shared: dict[str, int]

    def written(self, function: Function) -> list[str]:
        """The lines of a function."""
        found = []
        for number, line in enumerate(function.lines):
            found.append("".join(self._part(function, number, k, part) for k, part in enumerate(line)))
            given = [part.name for part in line if isinstance(part, Hole) and part.use is Use.GIVE]
            for name in self.shared.keys() & given:
                readers = self.shared[name]
                found.append(f"{name}[m] = [{name}[m]] * {readers}  # one for each reader, in any order")
            dead = dict.fromkeys(
                part.name
                for k, part in enumerate(line)
                if isinstance(part, Hole)
                and (function, part.name) in self.local
                and (function, number, k) in self.last
            )
            if dead and number + 1 < len(function.lines):
                found.append(f"del {', '.join(dead)}")
        return found

    def _part(self, function: Function, line: int, place: int, part: str | Hole) -> str:
        if isinstance(part, str):
            return part
        if (function, part.name) in self.local:
            return part.name
        if part.use is not Use.READ:
            return f"{part.name}[m]"
        if part.name in self.shared:
            return f"{part.name}[m].pop()"
        return f"{part.name}.pop(m)" if (function, line, place) in self.last else f"{part.name}[m]"


def lifetimes(orders: Iterable[tuple[Function, ...]]) -> Lifetimes:
    """orders: the functions that run for a microbatch in their order, for each microbatch; once if equal.

    A value is given and read for one microbatch.
    """
    local: dict[tuple[Function, str], bool] = {}
    ends: defaultdict[_Reader, set[bool]] = defaultdict(set)
    readers_of: dict[str, int] = {}
    for order in orders:
        givers: dict[str, Function] = {}
        readers: defaultdict[str, list[_Reader]] = defaultdict(list)
        apart = set()
        for function in order:
            for number, line in enumerate(function.lines):
                for place, part in enumerate(line):
                    match part:
                        case Hole(Use.READ, name):
                            readers[name].append((function, number, place))
                        case Hole(Use.GIVE, name):
                            givers[name] = function
                        case Hole(Use.PENDING, name):
                            apart.add(name)
        for name, giver in givers.items():
            alone = name not in apart and all(function is giver for function, *_ in readers[name])
            local[giver, name] = alone and local.get((giver, name), True)
        for name, found in readers.items():
            readers_of[name] = len(found)
            for reader in found:
                ends[reader].add(reader == found[-1])
    last = frozenset(reader for reader, ended in ends.items() if ended == {True})
    either = (
        function.lines[number][place] for (function, number, place), ended in ends.items() if len(ended) == 2
    )
    return Lifetimes(
        frozenset(key for key, alone in local.items() if alone),
        last,
        {part.name: readers_of[part.name] for part in either if isinstance(part, Hole)},
    )
