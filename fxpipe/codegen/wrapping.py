"""Wraps long lines of generated source at commas."""

from __future__ import annotations

import re
from itertools import pairwise

WIDTH = 120
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')  # as names.text_literal writes all of them


def wrapped(line: str) -> str:
    """Break a long statement at its commas; a list without brackets gets a pair, and ``del`` becomes several.
    A comment stays behind the first line, and has no width."""
    text = line.lstrip()
    if len(line) <= WIDTH or text.startswith(("#", '"')):
        return line
    end = _blank(line).find("  # ")
    if end >= 0:
        first, *rest = wrapped(line[:end]).split("\n")
        return "\n".join([first + line[end:], *rest])
    indent = line[: len(line) - len(text)]
    blank = _blank(text)
    if text.startswith("del "):
        rows = _rows(text, blank, 4, len(text), f"{indent}del")
        return "\n".join(row.removesuffix(",") for row in rows)
    if text.startswith("return "):
        return f"{indent}return {_bracketed(text, blank, 7, len(text), indent)}"
    equals = blank.find(" = ")
    call = equals + 3 if equals >= 0 else 0
    left, right = "[]" if text[call] == "[" else "()"
    opening, closing = blank.find(left, call), blank.rfind(right)
    first = indent + text[:call]
    if call and (len(indent) + equals > WIDTH - 30 or opening < 0):
        targets = _bracketed(text, blank, 0, equals, indent).removesuffix(")")
        first = f"{indent}{targets}\n{indent}) = "
        if len(indent) + 4 + len(text) - call <= WIDTH:
            return first + text[call:]
    if opening < 0:
        return first + text[call:]
    arguments = _bracketed(text, blank, opening + 1, closing, indent, (left, right))
    return f"{first}{text[call:opening]}{arguments}{text[closing + 1 :]}"


def _blank(text: str) -> str:
    """A text with a letter in the place of each character of its strings."""
    return _STRING.sub(lambda string: "s" * len(string.group()), text)


def _bracketed(
    text: str, blank: str, begin: int, end: int, indent: str, brackets: tuple[str, str] = ("(", ")")
) -> str:
    """The comma-separated items between two columns, in brackets, as many on a line as fit."""
    rows = _rows(text, blank, begin, end, f"{indent}   ")
    return f"{brackets[0]}\n" + "\n".join(rows) + brackets[1]


def _rows(text: str, blank: str, begin: int, end: int, start: str) -> list[str]:
    """Lines of the items between two columns, each after ``start``; one column is left for a bracket."""
    rows, current = [], start
    after_commas = [comma.end() for comma in re.compile(", ").finditer(blank, begin, end)]
    for first, stop in pairwise([begin, *after_commas, end]):
        item = text[first:stop].rstrip(" ")
        if len(current) + len(item) + 2 > WIDTH and current != start:  # with a space and a bracket
            rows.append(current)
            current = start
        current += " " + item
    return [*rows, current]
