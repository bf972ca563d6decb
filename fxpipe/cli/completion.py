"""``fxpipe completion``: the completion of all commands and options for a shell, made by shtab."""

from __future__ import annotations

import argparse

from fxpipe.cli.command import SUBCOMMANDS, parser
from fxpipe.errors import FxpipeError

SHELLS = ("bash", "zsh", "tcsh")


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints a script: fxpipe completion bash > ~/.local/share/bash-completion/completions/fxpipe"
    )
    parser.set_defaults(command=_completion)
    parser.add_argument("shell", choices=SHELLS)


def _completion(options: argparse.Namespace) -> None:
    try:
        import shtab
    except ImportError as error:
        raise FxpipeError("completion needs shtab: pip install 'fxpipe[completion]'") from error
    print(shtab.complete(parser(list(SUBCOMMANDS)), shell=options.shell))
