"""Options of commands that are options of ``fxpipe.compile`` too."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from fxpipe.compiler.options import Options

#: What ``compile`` takes for a value of the command line, where that is another one.
_AS: dict[str, Callable[[Any], Any]] = {
    "memory_limit": lambda limit: limit.unit or float(limit),
    "grad_dtype": lambda name: getattr(torch, name),
    "offload": lambda share: True if share == "all" else share,
}


def options_of(given: argparse.Namespace, which: type[Options]) -> dict[str, Any]:
    """Collect the options that were given and are fields of ``which``, as ``fxpipe.compile`` takes them."""
    names = {field.name for field in fields(which)}.intersection(given.of_compile)
    values = {name: getattr(given, name) for name in names}
    return {name: _AS.get(name, lambda x: x)(x) for name, x in values.items() if x is not None}
