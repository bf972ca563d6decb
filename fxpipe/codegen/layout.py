"""Lines of generated source, none longer than a reader's screen where there is a place to break it."""

from __future__ import annotations

import re
from itertools import pairwise

WIDTH = 110
_TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|[(),=]')  # all strings are written by names.text_literal


def wrapped(line: str) -> str:
    """Break a long statement at its commas; what has no brackets around it gets a pair."""
    text = line.lstrip()
    if len(line) <= WIDTH or text.startswith(("#", '"')):
        return line
    indent = line[: len(line) - len(text)]
    keyword = re.match(r"(return|del) ", text)
    if keyword:
        return f"{indent}{keyword.group()}{_bracketed(text[keyword.end() :], indent)}"
    targets, call = _assignment(text)
    first = f"{indent}{targets} = " if targets else indent
    if targets and (len(indent) + len(targets) > WIDTH - 30 or not _columns(call, "(")):
        first = f"{indent}{_bracketed(targets, indent)} = "
        if len(indent) + 4 + len(call) <= WIDTH:
            return first + call
    brackets = _columns(call, "()")
    if not brackets:
        return first + call
    opening, closing = brackets[0], brackets[-1]
    return f"{first}{call[:opening]}{_bracketed(call[opening + 1 : closing], indent)}{call[closing + 1 :]}"


def _assignment(text: str) -> tuple[str, str]:
    """Targets and value of a statement; no targets where it assigns nothing."""
    equals = [at for at in _columns(text, "=") if text[at - 1] == " "]  # not that of a keyword argument
    return (text[: equals[0] - 1], text[equals[0] + 2 :]) if equals else ("", text)


def _bracketed(items: str, indent: str) -> str:
    """Comma-separated items in round brackets, as many on a line as fit."""
    lines, current = [], indent + "   "
    commas = [at + 1 for at in _columns(items, ",") if items[at + 1 : at + 2] == " "]
    for begin, end in pairwise([0, *commas, len(items)]):
        item = items[begin:end].strip()
        if len(current) + len(item) + 1 > WIDTH and current.strip():
            lines.append(current)
            current = indent + "   "
        current += " " + item
    return "(\n" + "\n".join([*lines, current]) + f"\n{indent})"


def _columns(text: str, operators: str) -> list[int]:
    """Where these operators stand in the source; those within strings are none."""
    return [match.start() for match in _TOKENS.finditer(text) if match.group() in operators]
