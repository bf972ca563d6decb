"""Lines of a generated function, with the variables that each reads, to delete these after their last use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One statement, or several that belong together.

    ``heading``: a comment above it; lines that follow with the same one share it.
    """

    text: str
    reads: tuple[str, ...] = ()
    heading: str | None = None


def body(lines: Sequence[Line], kept: Iterable[str]) -> list[str]:
    """The lines, indented; the variables that they read are deleted under their last heading, but those
    ``kept``."""
    last = {name: line for line in lines for name in line.reads}
    for name in kept:
        last.pop(name, None)
    found: list[str] = []
    dead: list[str] = []
    heading: str | None = None
    for line in lines:
        if line.heading != heading:
            found += _deletion(dead)
            dead, heading = [], line.heading
            found += [heading] if heading else []
        found += line.text.split("\n") if line.text else []
        dead += [name for name in line.reads if last.get(name) is line]
    return [f"    {text}" for text in found + _deletion(dead)]


def unpacking(names: Sequence[str], value: str) -> str:
    """``a, b = value``."""
    return f"({names[0]},) = {value}" if len(names) == 1 else f"{', '.join(names)} = {value}"


def _deletion(dead: Sequence[str]) -> list[str]:
    return [f"del {', '.join(dict.fromkeys(dead))}"] if dead else []
