"""The entry point.  Errors of fxpipe become one line on stderr and exit code 2.

A subcommand's module is imported when it is asked for, so that ``fxpipe --help`` loads no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from fxpipe.cli.arguments import Parser
from fxpipe.errors import FxpipeError
from fxpipe.names import printable
from fxpipe.version import __version__

#: Name -> its module, and a line about it.
SUBCOMMANDS = {
    "simulate": ("fxpipe.cli.simulate", "predict bubble and memory of a schedule"),
    "compare": ("fxpipe.cli.compare", "all schedules for one setting"),
    "explain": ("fxpipe.cli.explain", "why a saved pipeline has the schedule that it has"),
    "run": ("fxpipe.cli.run_command", "train a saved pipeline (under torchrun)"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; ``arguments`` default to those of the process."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = Parser(prog="fxpipe", description="A pipeline-parallel compiler for PyTorch.")
    parser.add_argument("--version", action="version", version=f"fxpipe {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True, parser_class=Parser)
    chosen = next((argument for argument in given if not argument.startswith("-")), None)
    for name, (module, line) in SUBCOMMANDS.items():
        if name == chosen:
            import_module(module).add_to(commands, line)
        else:
            commands.add_parser(name, help=line)
    options = parser.parse_args(given)
    try:
        options.command(options)
    except FxpipeError as error:
        message = "\n".join(map(printable, f"fxpipe: error: {error}".split("\n")))
        print(message, file=sys.stderr)
        return 2
    return 0
