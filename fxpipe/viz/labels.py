"""Labels of graphviz's pictures: their font, and any text made safe, so that it cannot become markup."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import graphviz

from fxpipe.errors import printable

FONT = {"fontname": "Helvetica", "fontsize": "10"}


def dot_label(lines: Iterable[str]) -> str:
    """A label or tooltip for the ``graphviz`` package."""
    label: str = graphviz.escape("\n".join(printable(line).replace("&", "&amp;") for line in lines))
    return label


def dot_html(text: str) -> str:
    """Text within one of graphviz's HTML-like labels."""
    return escape(printable(text))
