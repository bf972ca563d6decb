"""``fxpipe explain``: the candidates of ``auto`` for a saved pipeline, and the reasons for its choice."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from fxpipe.plan.saved.files import read_plan
from fxpipe.viz.explanation import explain


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists the candidates of schedule='auto' for a saved pipeline, fastest first."
    parser.set_defaults(command=_explain)
    parser.add_argument("directory", type=Path, help="a saved pipeline")


def _explain(options: argparse.Namespace) -> None:
    explain(read_plan(options.directory), Console(markup=False, emoji=False))
