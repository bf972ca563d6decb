"""The entry point.  An FxpipeError becomes one line on stderr and exit code 2; Ctrl-C one line and 130.

Only the command that runs is imported: the help needs the modules of ``options/``, which load no torch.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module

from fxpipe.cli.arguments import Parser, flag
from fxpipe.errors import FxpipeError, printable, suggested
from fxpipe.plan.version import __version__

#: Name -> the module of ``options/`` with its ``add_<name>``, and its line in the help.
SUBCOMMANDS = {
    "simulate": ("simulate", "predict bubble and memory of a schedule"),
    "compare": ("compare", "simulate all schedules and compare them"),
    "plan": ("plan", "compare meshes of ranks and replicas for a model, without hardware"),
    "compile": ("compile", "compile a model and save the pipeline"),
    "calibrate": ("calibrate", "measure this machine's device, for plans"),
    "check": ("saved", "prove that a saved pipeline's programs are the captured step"),
    "explain": ("saved", "list the candidates that were considered for a saved pipeline"),
    "report": ("saved", "write everything about a saved pipeline as one HTML file"),
    "trace": ("saved", "write a saved pipeline's step as a trace for Perfetto"),
    "draw": ("saved", "draw the schedule of a saved pipeline"),
    "diff": ("diff", "compare the decisions of two saved pipelines"),
    "run": ("run", "train a saved pipeline (under torchrun)"),
    "export": ("export", "write a checkpoint's weights for from_pretrained"),
    "replay": ("replay", "run one op of a recorded step alone, in a debugger if asked"),
    "completion": ("completion", "print the completion of these commands for a shell"),
}

#: What one wants -> the commands for it, and the page that says more: ``fxpipe help schedules``.
TOPICS = {
    "schedules": (("simulate", "compare"), "docs/schedules.md"),
    "planning": (("plan", "calibrate"), "docs/costs.md"),
    "training": (("compile", "run", "export"), "docs/training.md"),
    "seeing": (("explain", "report", "draw", "trace", "diff"), "docs/report.md"),
    "debugging": (("check", "replay"), "docs/debugging.md"),
}

#: What a script does, and not the command line: what it would be called -> what to write.
IN_PYTHON = {
    "train": "a script trains, with pipe.step(batch) under torchrun; fxpipe run trains a saved pipeline.",
    "version": "fxpipe --version prints it.",
}

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; ``arguments`` default to ``sys.argv[1:]``."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    chosen = next((argument for argument in words if not argument.startswith("-")), None)
    if not words:
        parser([]).print_help()
        return 0
    try:
        if chosen == "help":
            _help(words[words.index(chosen) + 1 :])
            return 0
        if chosen is not None and chosen not in SUBCOMMANDS:
            if chosen in IN_PYTHON:
                raise FxpipeError(f"there is no command {chosen!r}: {IN_PYTHON[chosen]}")
            known = ", ".join(SUBCOMMANDS)
            raise FxpipeError(
                f"there is no command {chosen!r}.{suggested(chosen, SUBCOMMANDS)} Commands: {known}"
            )
        if chosen is None and not {"-h", "--help", "--version"} & {*words}:
            raise FxpipeError(f"fxpipe has no option {words[0]!r}. See fxpipe --help")
        # Not ``parse_args``, whose error for what is unknown has no suggestion.
        options, unknown = parser([] if chosen is None else [chosen]).parse_known_args(words)
        if unknown:
            other = suggested(unknown[0], map(flag, vars(options)))
            raise FxpipeError(
                f"fxpipe {chosen or ''} has no {unknown[0]!r}.{other} See fxpipe {chosen or ''} --help"
            )
        module, function = options.command.split(":")
        getattr(import_module(f"fxpipe.cli.{module}"), function)(options)
        sys.stdout.flush()
    except BrokenPipeError:  # of ``| head``, which has read enough; nothing more is flushed at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (FxpipeError, OSError) as error:
        # Before Python 3.14 Path.is_dir and the like raise for a name that is longer than names of files are.
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            raise
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from fxpipe.runtime.job.watch import ends_before_others  # it imports torch

            ends_before_others(error)
        message = "\n".join(map(printable, f"fxpipe: error: {error}".split("\n")))
        print(message, file=sys.stderr)
        return 2
    except KeyboardInterrupt as left:
        if os.environ.get("RANK", "0") == "0":  # it reaches all ranks
            print(f"fxpipe: {str(left) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    return 0


def _help(subjects: Sequence[str]) -> None:
    """``fxpipe help``, of a topic or a command if one is named."""
    subject = next(iter(subjects), None)
    if subject in SUBCOMMANDS:
        parser([subject]).parse_args([subject, "--help"])
    elif subject in TOPICS:
        commands, page = TOPICS[subject]
        for name in commands:
            print(f"fxpipe {name:<10} {SUBCOMMANDS[name][1]}")
        for line in _schedules() if subject == "schedules" else ():
            print(line)
        print(f"More: {page}")
    elif subject is None:
        parser([]).print_help()
    else:
        known = suggested(subject, [*TOPICS, *SUBCOMMANDS])
        raise FxpipeError(f"there is no help on {subject!r}.{known} Topics: {', '.join(TOPICS)}")


def _schedules() -> Iterator[str]:
    from fxpipe.schedule.families.registry import FAMILIES  # it imports numba

    yield "\nOf p ranks and m microbatches; M_B is what a rank holds of a microbatch:"
    yield from (f"  {name:<12} {family.summary}" for name, family in FAMILIES.items())
    yield ""


def parser(complete: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands, with the options of those in ``complete``."""
    topics = (f"  {topic:<11} {', '.join(commands)}" for topic, (commands, _) in TOPICS.items())
    made = Parser(
        prog="fxpipe",
        description="A pipeline-parallel compiler for PyTorch.",
        epilog="\n".join(["by topic, which fxpipe help TOPIC explains:", *topics]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"fxpipe {__version__}")
    commands = made.add_subparsers(metavar="command", required=True, parser_class=Parser)
    for name, (module, line) in SUBCOMMANDS.items():
        subparser = commands.add_parser(name, help=line)
        if name in complete:
            getattr(import_module(f"fxpipe.cli.options.{module}"), f"add_{name}")(subparser)
    return made
