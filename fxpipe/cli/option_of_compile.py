"""Options of commands that are options of ``fxpipe.compile`` too."""

from __future__ import annotations

import argparse
from typing import Any

from fxpipe.api.arguments import DOCS
from fxpipe.cli.arguments import flag, named_length


def add_option(parser: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    """Add one; its help is the first sentence of its documentation there."""
    text = DOCS.get(name, name).split(". ")[0].rstrip(".").replace("`", "").replace("%", "%%")
    default = f" ({settings['default']})" if "default" in settings else ""
    parser.add_argument(flag(name), help=f"{text[0].lower()}{text[1:]}{default}", **settings)


def add_dimension(parser: argparse.ArgumentParser) -> None:
    """Add ``--dimension``, for each item of ``dimensions`` one."""
    parser.add_argument(
        "--dimension",
        type=named_length,
        action="append",
        default=[],
        metavar="NAME=N",
        help="a name for the dimensions of the example that are N long",
    )
