"""``fxpipe check``: proves that a saved pipeline's programs are the captured step, or says where not."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxpipe.api.check import check_saved
from fxpipe.cli.arguments import working
from fxpipe.errors import RunError, printable
from fxpipe.plan.saved.files import evaluation_directory


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs the programs of all ranks on terms in the place of tensors, and compares the loss, each "
        "gradient, buffer and output with the captured step, for every microbatch."
    )
    parser.set_defaults(command=_check)
    parser.add_argument("directory", type=Path, help="a saved pipeline")


def _check(options: argparse.Namespace) -> None:
    directory: Path = options.directory
    evaluation = evaluation_directory(directory)
    holds = [_is_checked(each) for each in (directory, evaluation) if each == directory or each.exists()]
    if not all(holds):
        raise RunError("The programs are not proved to be the captured step.")


def _is_checked(directory: Path) -> bool:
    """Print the certificate of one directory of programs."""
    with working("check"):
        certificate = check_saved(directory)
    print("\n".join(printable(line) for line in [f"{directory}:", *str(certificate).splitlines()]))
    return certificate.holds
