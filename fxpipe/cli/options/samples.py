"""Options of samples: their lengths."""

from __future__ import annotations

import argparse

from fxpipe.cli.arguments import positive_int, whole_number
from fxpipe.cli.lengths import HELP, lengths


def add_lengths(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--lengths", type=lengths, metavar="L", help=f"{help}: {HELP}")
    parser.add_argument(
        "--tokens",
        type=positive_int,
        metavar="N",
        help="pack samples into rows of up to N tokens (a quarter, a half and all of the example's)",
    )
    parser.add_argument("--seed", type=whole_number, default=0, metavar="N", help="of drawn lengths (0)")


def add_samples(parser: argparse.ArgumentParser, help: str) -> None:
    add_lengths(parser, help)
    parser.add_argument(
        "--samples",
        type=positive_int,
        metavar="N",
        help="draw so many for each of some steps (of a distribution as many as the plan has rows)",
    )
