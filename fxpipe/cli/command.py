"""The entry point.  Errors of fxpipe become one line on stderr and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fxpipe.cli import compare, explain, simulate
from fxpipe.cli import run_command as run
from fxpipe.cli.arguments import Parser
from fxpipe.errors import FxpipeError
from fxpipe.names import terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; ``arguments`` default to those of the process."""
    parser = Parser(prog="fxpipe", description="A pipeline-parallel compiler for PyTorch.")
    commands = parser.add_subparsers(metavar="command", required=True, parser_class=Parser)
    for subcommand in (simulate, compare, explain, run):
        subcommand.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        options.command(options)
    except FxpipeError as error:
        print(terminal(f"fxpipe: error: {error}"), file=sys.stderr)
        return 2
    return 0
