"""Lines of a generated function, with the variables that each reads, to free these after their last use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

CARRY = "carry"  # the list of values that the function which takes it frees


@dataclass(frozen=True)
class Statement:
    """One statement, or several that belong together.

    ``heading``: a comment above it; lines that follow with the same one share it.  ``frees``: whether what is
    dead behind the line is freed there, and not behind all lines of the heading.  ``allocates``: whether it
    may need new memory.
    """

    text: str
    reads: tuple[str, ...] = ()
    heading: str | None = None
    frees: bool = False
    allocates: bool = True


def body(lines: Sequence[Statement], needed: Iterable[str], storages: Mapping[str, str]) -> list[str]:
    """The lines, indented, with each storage freed under the heading of its last use, but for those that the
    function's end frees.

    storages: of each variable, the one that it is a view of, or something else for what the function cannot
    free.  A storage with a variable that is ``needed`` stays.
    """
    last: dict[str, int] = {}
    users: dict[str, dict[str, None]] = {}
    for number, line in enumerate(lines):
        for name in line.reads:
            storage = storages.get(name, name)
            last[storage] = number
            users.setdefault(storage, {})[name] = None
    stay = {storages.get(name, name) for name in needed}
    ends: dict[int, list[str]] = {}
    for storage, names in users.items():
        if storage not in stay and storage.isidentifier():
            ends.setdefault(last[storage], []).extend(names)
    text: list[str] = []
    dead: list[str] = []
    is_due, heading = False, None
    for number, line in enumerate(lines):
        # What is dead stays as long as nothing needs its memory, so that there are few deletions.
        if (is_due or line.heading != heading) and line.allocates:
            text += [f"del {', '.join(dict.fromkeys(dead))}"] if dead else []
            dead, is_due = [], False
        if line.heading != heading:
            heading, is_due = line.heading, bool(dead)
            text += [heading] if heading else []
        text += line.text.split("\n") if line.text else []
        dead += ends.get(number, [])
        is_due |= line.frees
    return [f"    {each}" for each in text]


def unpacking(names: Sequence[str], value: str) -> str:
    """``a, b = value``."""
    return f"({names[0]},) = {value}" if len(names) == 1 else f"{', '.join(names)} = {value}"


def emptying(names: Sequence[str], records: str) -> list[Statement]:
    """Take all values out of a list: they live on in their variables alone."""
    if len(names) == 1:
        return [Statement(f"{names[0]} = {records}.pop()")]
    return [Statement(unpacking(names, records)), Statement(f"{records}.clear()")]
