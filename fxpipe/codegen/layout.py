"""Lines of generated source, none longer than a reader's screen."""

from __future__ import annotations

import re

WIDTH = 110


def wrapped(line: str) -> str:
    """Break a long statement at its commas; what has no brackets around it gets a pair."""
    if len(line) <= WIDTH or line.lstrip().startswith(("#", '"')):
        return line
    indent = line[: len(line) - len(line.lstrip())]
    text = line.strip()
    keyword = re.match(r"(return|del) ", text)
    if keyword:
        return f"{indent}{keyword.group()}{_bracketed(text[keyword.end() :], indent)}"
    targets, equals, call = text.partition(" = ")
    if equals and (len(indent) + len(targets) > WIDTH - 30 or "(" not in call):
        first, text = f"{indent}{_bracketed(targets, indent)} = ", call
        if len(indent) + 4 + len(call) <= WIDTH:
            return first + call
    else:
        first = indent
    opening, closing = text.find("("), text.rfind(")")
    return f"{first}{text[:opening]}{_bracketed(text[opening + 1 : closing], indent)}{text[closing + 1 :]}"


def _bracketed(items: str, indent: str) -> str:
    """Comma-separated items in round brackets, as many on a line as fit."""
    lines, current = [], indent + "   "
    for item in re.split(r"(?<=,) ", items):
        if len(current) + len(item) + 1 > WIDTH and current.strip():
            lines.append(current)
            current = indent + "   "
        current += " " + item
    return "(\n" + "\n".join([*lines, current]) + f"\n{indent})"
