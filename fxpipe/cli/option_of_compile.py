"""Options of commands that are options of ``fxpipe.compile`` too."""

from __future__ import annotations

import argparse
from typing import Any

from fxpipe.api.arguments import DOCS
from fxpipe.cli.arguments import flag


def add_option(parser: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    """Add one; its help is the first sentence of its documentation there."""
    text = DOCS.get(name, name).split(". ")[0].rstrip(".").replace("`", "").replace("%", "%%")
    default = f" ({settings['default']})" if "default" in settings else ""
    parser.add_argument(flag(name), help=f"{text[0].lower()}{text[1:]}{default}", **settings)
