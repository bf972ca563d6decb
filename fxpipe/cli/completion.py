"""``fxpipe completion``: the completion of all commands and options: for fish by this file, else by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

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
    made = parser(list(SUBCOMMANDS))
    if options.shell == "fish":
        print("\n".join(_fish(made)))
        return
    try:
        import shtab
    except ImportError as error:
        raise FxpipeError("completion needs shtab: pip install 'fxpipe[completion]'") from error
    print(shtab.complete(made, shell=options.shell))


def _fish(made: argparse.ArgumentParser) -> Iterator[str]:
    """Lines of ``complete``: names of commands first, then the options of each behind its name."""
    names = " ".join(SUBCOMMANDS)
    (commands,) = (action for action in made._actions if isinstance(action, argparse._SubParsersAction))
    first = f"not __fish_seen_subcommand_from {names}"
    yield from _options(made, first)
    for name, (_, line) in SUBCOMMANDS.items():
        yield f"complete -c fxpipe -f -n {_quoted(first)} -a {name} -d {_quoted(line)}"
        yield from _options(commands.choices[name], f"__fish_seen_subcommand_from {name}")


def _options(made: argparse.ArgumentParser, condition: str) -> Iterator[str]:
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        words = ["complete", "-c fxpipe", f"-n {_quoted(condition)}"]
        for flag in action.option_strings:
            words.append(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}")
        if action.choices is not None:
            words.append(f"-x -a {_quoted(' '.join(map(str, action.choices)))}")
        elif not action.option_strings:
            continue  # of a path, which fish completes by itself
        elif action.nargs not in (0, "?"):
            words.append("-r")
        if action.help and action.help != argparse.SUPPRESS:
            words.append(f"-d {_quoted(action.help.replace('%%', '%'))}")
        yield " ".join(words)


def _quoted(text: str) -> str:
    """Quote a word for fish: between single quotes a backslash and a quote are all that is special."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
