"""An extension of griffe: docstrings as Markdown.

``name: text`` of an argument becomes an item of a list, and the name of a page in docs/ a link.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): ", re.MULTILINE)
PAGE = re.compile(r"docs/(\w+)\.md")
RAISES = re.compile(r"\n(?=Raises )")  # ends the list of arguments
ROLE = re.compile(r":\w+:`([^`]*)`")


class Docstrings(griffe.Extension):
    """Rewrites each docstring when its object has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    paragraphs = PAGE.sub(r"[\1.md](\1.md)", ROLE.sub(r"`\1`", text)).split("\n\n")
    paragraphs = [RAISES.sub("\n\n", paragraph) for paragraph in paragraphs]
    return "\n\n".join(ARGUMENT.sub(r"- **\1**: ", paragraph) for paragraph in paragraphs)
