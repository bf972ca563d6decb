"""Makes names safe in pictures: any text as a label, so that it cannot become markup."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import graphviz

from fxpipe.errors import printable

LONGEST_LABEL = 60


def shortened(text: str) -> str:
    """The printable text, without its middle if it is too long for a label."""
    text = printable(text)
    if len(text) <= LONGEST_LABEL:
        return text
    half = LONGEST_LABEL // 2
    return f"{text[:half]}…{text[1 - half :]}"


def dot_label(lines: Iterable[str]) -> str:
    """A label or tooltip for the ``graphviz`` package."""
    label: str = graphviz.escape("\n".join(printable(line).replace("&", "&amp;") for line in lines))
    return label


def dot_html(text: str) -> str:
    """Text within one of graphviz's HTML-like labels."""
    return escape(printable(text))
