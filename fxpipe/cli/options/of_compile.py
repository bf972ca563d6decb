"""Options of commands that are options of ``fxpipe.compile`` too."""

from __future__ import annotations

import argparse
from typing import Any

from fxpipe.api.option_docs import DOCS
from fxpipe.cli.arguments import flag, memory, named_length, positive, positive_int
from fxpipe.plan.rewrites import ASKED, RULES
from fxpipe.schedule.ops import VALIDATIONS

_RULES = [rule for rule in RULES if rule not in ASKED]


def add_option(parser: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    """Add one, for ``options_of`` as well; its help is the first sentence of its documentation there, or a
    ``help`` of its own."""
    text = DOCS.get(name, name).split(". ")[0].rstrip(".").replace("`", "").replace("%", "%%")
    default = f" ({settings['default']})" if "default" in settings else ""
    parser.add_argument(flag(name), **{"help": f"{text[0].lower()}{text[1:]}{default}", **settings})
    parser.set_defaults(of_compile=(*(parser.get_default("of_compile") or ()), name))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add those that a command which compiles and one which plans have in common."""
    add_option(parser, "schedule", default="auto", metavar="NAME")
    add_option(parser, "memory_limit", type=memory, metavar="BYTES")
    add_option(parser, "recompute", choices=("norms", "full", "auto"))
    add_option(parser, "vocab_parallel", choices=("1-barrier", "2-barrier", "auto"))
    add_option(parser, "head_chunks", type=_number_or_auto, default=1, metavar="N")
    add_option(parser, "without", action="append", choices=_RULES, metavar="RULE")
    add_option(parser, "grad_dtype", choices=("float32", "float64"))
    add_option(parser, "backend", choices=("eager", "inductor"), default="eager")
    add_option(parser, "validation", choices=VALIDATIONS, default="barrier")
    add_option(parser, "effort", type=positive, metavar="S")


def _number_or_auto(text: str) -> int | str:
    return text if text == "auto" else positive_int(text)


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
