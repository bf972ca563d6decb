"""Options of ``fxpipe diff``."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_diff(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares model, schedule, stages, orders of ops and predictions of two saved pipelines."
    )
    parser.set_defaults(command="diff:diff")
    parser.add_argument("first", type=Path, help="a saved pipeline")
    parser.add_argument("second", type=Path, help="another one")
    parser.add_argument("--json", action="store_true", help="print a JSON list of what differs")
