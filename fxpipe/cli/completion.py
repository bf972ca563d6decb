"""``fxpipe completion``: the completion of all commands and options, by shtab."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxpipe.cli.arguments import output, picture
from fxpipe.cli.command import SUBCOMMANDS, parser
from fxpipe.errors import FxpipeError

SHELLS = ("bash", "fish", "zsh", "tcsh")


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints a script: fxpipe completion bash > ~/.local/share/bash-completion/completions/fxpipe, or "
        "fxpipe completion fish > ~/.config/fish/completions/fxpipe.fish"
    )
    parser.set_defaults(command=_completion)
    parser.add_argument("shell", choices=SHELLS)


def _completion(options: argparse.Namespace) -> None:
    try:
        import shtab
    except ImportError as error:
        raise FxpipeError("completion needs shtab: pip install 'fxpipe[completion]'") from error
    made = parser(list(SUBCOMMANDS))
    (commands,) = (action for action in made._actions if isinstance(action, argparse._SubParsersAction))
    for command in commands.choices.values():
        for action in command._actions:
            if action.type in (Path, output, picture):
                action.complete = shtab.FILE
    print(shtab.complete(made, shell=options.shell))
