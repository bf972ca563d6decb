"""Wraps long lines of generated source at commas."""

from __future__ import annotations

import re
from itertools import pairwise

WIDTH = 110
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')  # as names.text_literal writes all of them


def wrapped(line: str) -> str:
    """Break a long statement at its commas; a list without brackets gets a pair.  A comment stays behind its
    first line, and has no width."""
    text = line.lstrip()
    if len(line) <= WIDTH or text.startswith(("#", '"')):
        return line
    end = _blank(line).find("  # ")
    if end >= 0:
        first, *rest = wrapped(line[:end]).split("\n")
        return "\n".join([first + line[end:], *rest])
    indent = line[: len(line) - len(text)]
    blank = _blank(text)
    keyword = re.match(r"(return|del) ", text)
    if keyword:
        return f"{indent}{keyword.group()}{_bracketed(text, blank, keyword.end(), len(text), indent)}"
    equals = blank.find(" = ")
    call = equals + 3 if equals >= 0 else 0
    opening, closing = blank.find("(", call), blank.rfind(")")
    first = indent + text[:call]
    if call and (len(indent) + equals > WIDTH - 30 or opening < 0):
        first = f"{indent}{_bracketed(text, blank, 0, equals, indent)} = "
        if len(indent) + 4 + len(text) - call <= WIDTH:
            return first + text[call:]
    if opening < 0:
        return first + text[call:]
    arguments = _bracketed(text, blank, opening + 1, closing, indent)
    return f"{first}{text[call:opening]}{arguments}{text[closing + 1 :]}"


def _blank(text: str) -> str:
    """The same columns without strings."""
    return _STRING.sub(lambda string: "s" * len(string.group()), text)


def _bracketed(text: str, blank: str, begin: int, end: int, indent: str) -> str:
    """The comma-separated items between two columns, in round brackets, as many on a line as fit."""
    lines, current = [], indent + "   "
    after_commas = [comma.end() for comma in re.compile(", ").finditer(blank, begin, end)]
    for start, stop in pairwise([begin, *after_commas, end]):
        item = text[start:stop].rstrip(" ")
        if len(current) + len(item) + 1 > WIDTH and current.strip():
            lines.append(current)
            current = indent + "   "
        current += " " + item
    return "(\n" + "\n".join([*lines, current]) + f"\n{indent})"
