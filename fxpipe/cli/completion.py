"""``fxpipe completion``: the completion of all commands and options, by shtab."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxpipe.cli.arguments import output, picture
from fxpipe.cli.command import SUBCOMMANDS, parser
from fxpipe.errors import FxpipeError


def completion(options: argparse.Namespace) -> None:
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
