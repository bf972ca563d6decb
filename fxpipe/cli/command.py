"""The entry point.  An FxpipeError becomes one line on stderr and exit code 2.

Only the module of the subcommand that runs is imported, so that ``fxpipe --help`` does not load torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from fxpipe.cli.arguments import Parser
from fxpipe.errors import FxpipeError, printable
from fxpipe.plan.version import __version__

#: Name -> its module, and its line in the help.
SUBCOMMANDS = {
    "simulate": ("fxpipe.cli.simulate", "predict bubble and memory of a schedule"),
    "compare": ("fxpipe.cli.compare", "simulate all schedules and compare them"),
    "plan": ("fxpipe.cli.plan", "compare meshes of ranks and replicas for a model, without hardware"),
    "check": ("fxpipe.cli.check", "prove that a saved pipeline's programs are the captured step"),
    "explain": ("fxpipe.cli.explain", "list the candidates that were considered for a saved pipeline"),
    "report": ("fxpipe.cli.report", "write everything about a saved pipeline as one HTML file"),
    "trace": ("fxpipe.cli.trace", "write a saved pipeline's step as a trace for Perfetto"),
    "run": ("fxpipe.cli.run_command", "train a saved pipeline (under torchrun)"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; ``arguments`` default to ``sys.argv[1:]``."""
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
