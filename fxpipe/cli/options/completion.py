"""Options of ``fxpipe completion``."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "fish", "zsh", "tcsh")


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints a script: fxpipe completion bash > ~/.local/share/bash-completion/completions/fxpipe, or "
        "fxpipe completion fish > ~/.config/fish/completions/fxpipe.fish"
    )
    parser.set_defaults(command="completion:completion")
    parser.add_argument("shell", choices=SHELLS, help="that reads the script")
