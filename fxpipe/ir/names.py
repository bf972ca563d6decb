"""Makes names safe in generated code: any text as an identifier, literal, comment or docstring.

A module, a parameter, a class, a file or a key of the batch can have any name.  All code that writes such a
name into a program uses a function of this module, so that the name cannot end the string or the comment
that contains it, or become code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import chain, count

from fxpipe.errors import printable

LONGEST_IDENTIFIER = 80


def identifier(text: str) -> str:
    """A lower-case ASCII identifier that resembles the text; different texts may give the same one.

    Never empty, and such that ``fx.Graph`` keeps it as the name of a placeholder.
    """
    word = re.sub(r"[^0-9A-Za-z]+", "_", text)
    word = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).lower().strip("_")
    word = word[-LONGEST_IDENTIFIER:].strip("_")  # the end is most specific: an op, the innermost module
    if not word:
        return "unnamed"
    return f"_{word}" if word[0].isdigit() else word


def unused(name: str, is_taken: Callable[[str], bool]) -> str:
    """The name, or the first of ``name_2``, ``name_3``, … that is not taken."""
    return next(text for text in chain([name], (f"{name}_{k}" for k in count(2))) if not is_taken(text))


def text_literal(text: str) -> str:
    """A Python string literal on one line, of printable characters."""
    return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def comment(text: str) -> str:
    return f"# {printable(text)}"


def docstring(lines: Iterable[str]) -> str:
    """The lines between triple quotes, escaped so that none can end the docstring."""
    body = "\n".join(printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return f'"""{body}\n"""'
