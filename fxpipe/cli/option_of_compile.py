"""Options of commands that are options of ``fxpipe.compile`` too."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from fxpipe.api.arguments import DOCS
from fxpipe.cli.arguments import flag, memory, named_length, positive
from fxpipe.schedule.ops import VALIDATIONS

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def add_option(parser: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    """Add one; its help is the first sentence of its documentation there, or a ``help`` of its own."""
    text = DOCS.get(name, name).split(". ")[0].rstrip(".").replace("`", "").replace("%", "%%")
    default = f" ({settings['default']})" if "default" in settings else ""
    parser.add_argument(flag(name), **{"help": f"{text[0].lower()}{text[1:]}{default}", **settings})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add those that a command which compiles and one which plans have in common."""
    add_option(parser, "schedule", default="auto", metavar="NAME")
    add_option(parser, "memory_limit", type=memory, metavar="BYTES")
    add_option(parser, "recompute", choices=("norms", "full", "auto"))
    add_option(parser, "vocab_parallel", choices=("1-barrier", "2-barrier", "auto"))
    add_option(parser, "grad_dtype", choices=_DTYPES)
    add_option(parser, "backend", choices=("eager", "inductor"), default="eager")
    add_option(parser, "validation", choices=VALIDATIONS, default="barrier")
    add_option(parser, "effort", type=positive, metavar="S")


def options_of(given: argparse.Namespace) -> dict[str, Any]:
    """These as ``fxpipe.compile`` takes them."""
    limit = given.memory_limit
    return {
        **{name: getattr(given, name) for name in ("schedule", "backend", "validation", "effort")},
        "memory_limit": None if limit is None else limit.unit or float(limit),
        "recompute": given.recompute or False,
        "vocab_parallel": given.vocab_parallel or False,
        "grad_dtype": _DTYPES.get(given.grad_dtype),
    }


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
