"""Makes names safe: any text as an identifier, literal, comment, docstring or label.

A module, a parameter, a class, a file or a key of the batch can have any name.  All code that writes such a
name uses a function of this module, so that the name cannot end the string, comment or label that contains
it, or become code or markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

LONGEST_IDENTIFIER = 80
LONGEST_LABEL = 60


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


def text_literal(text: str) -> str:
    """A Python string literal on one line, of printable characters."""
    return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def printable(text: str) -> str:
    """The text on one line: unprintable characters become escapes such as ``\\n`` or ``\\u202e``.

    The result can be encoded, is allowed in XML, ends no comment and moves no terminal's cursor.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def comment(text: str) -> str:
    return f"# {printable(text)}"


def docstring(lines: Iterable[str]) -> str:
    """The lines between triple quotes, escaped so that none can end the docstring."""
    body = "\n".join(printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return f'"""{body}\n"""'


def shortened(text: str) -> str:
    """The printable text, without its middle if it is too long for a label."""
    text = printable(text)
    if len(text) <= LONGEST_LABEL:
        return text
    half = LONGEST_LABEL // 2
    return f"{text[:half]}…{text[1 - half :]}"


def dot_label(lines: Iterable[str]) -> str:
    """A label or tooltip for the ``graphviz`` package."""
    import graphviz  # imported here, as programs and the command line's help draw nothing

    label: str = graphviz.escape("\n".join(printable(line).replace("&", "&amp;") for line in lines))
    return label


def dot_html(text: str) -> str:
    """Text within one of graphviz's HTML-like labels."""
    return escape(printable(text))


def terminal(text: str) -> Text:
    """Text for rich, without markup, emoji codes or control characters other than line breaks."""
    from rich.text import Text

    return Text("\n".join(map(printable, text.split("\n"))))
