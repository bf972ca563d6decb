"""What a saved pipeline tells: ``fxpipe check``, ``explain``, ``draw``, ``report`` and ``trace``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from fxpipe.certificate.check import check_artifact
from fxpipe.certificate.problems import Certificate
from fxpipe.cli.arguments import output, picture, working, write_picture
from fxpipe.cost.plan_costs import costs_of
from fxpipe.errors import RunError, printable
from fxpipe.plan.artifact import Artifact
from fxpipe.plan.libraries import import_libraries
from fxpipe.plan.saved.files import CAPTURED, directories, read_captured, read_plan, read_programs
from fxpipe.runtime.program import lanes as lanes  # registers ops that a captured step may have
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.viz.explanation import explain
from fxpipe.viz.report.write import saved_source, write_report
from fxpipe.viz.timeline_picture import timeline_svg
from fxpipe.viz.trace import write_trace


def _add(
    parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], None], description: str
) -> None:
    parser.description = description
    parser.set_defaults(command=command)
    parser.add_argument("directory", type=Path, help="a saved pipeline")


def add_check(parser: argparse.ArgumentParser) -> None:
    description = (
        "Runs the programs of all ranks on terms in the place of tensors, and compares the loss, each "
        "gradient, buffer and output with the captured step, for every microbatch."
    )
    _add(parser, _check, description)


def _check(options: argparse.Namespace) -> None:
    directory: Path = options.directory
    holds = [_is_checked(each) for each in directories(directory)]  # each is shown
    if not all(holds):
        raise RunError("The programs are not proved to be the captured step.")


def _is_checked(directory: Path) -> bool:
    """Print the certificate of one directory of programs."""
    with working("check"):
        certificate = _certificate(directory)
    print("\n".join(printable(line) for line in [f"{directory}:", *str(certificate).splitlines()]))
    return certificate.holds


def _certificate(directory: Path) -> Certificate:
    """The check of a saved pipeline's programs, which needs neither its weights nor processes.

    Imports the modules that the plan names for ops of other libraries.
    Raises ArtifactError for missing or damaged files, or ops; RunError for those of an earlier version.
    """
    plan = read_plan(directory)
    import_libraries(plan.libraries, str(directory))
    programs = read_programs(directory, plan, range(plan.ranks))
    artifact = Artifact(plan, programs, {}, plan.number, captured=read_captured(directory))
    return check_artifact(artifact, str(directory / CAPTURED))


def add_explain(parser: argparse.ArgumentParser) -> None:
    _add(parser, _explain, "Lists the candidates of schedule='auto' for a saved pipeline, fastest first.")


def _explain(options: argparse.Namespace) -> None:
    explain(read_plan(options.directory), Console(markup=False, emoji=False))


def add_draw(parser: argparse.ArgumentParser) -> None:
    description = "Draws the simulated step of a saved pipeline: its ops, transfers and memory by rank."
    _add(parser, _draw, description)
    parser.add_argument("file", type=picture, help="the picture, .svg or .png")


def _draw(options: argparse.Namespace) -> None:
    plan = read_plan(options.directory)
    write_picture(options.file, timeline_svg(simulate(plan.ordered, costs_of(plan)), plan.model))
    print(printable(f"drawn: {options.file}"))


def add_report(parser: argparse.ArgumentParser) -> None:
    description = (
        "Writes the timeline of all ranks with what each waits for, memory by kind, the graph, stages, "
        "links and candidates of a saved pipeline as one HTML file that needs no network; with the "
        "measured step, if one was recorded there (fxpipe run --record)."
    )
    _add(parser, _report, description)
    parser.add_argument("-o", "--output", type=output, metavar="FILE.html", help="DIRECTORY/report.html")


def _report(options: argparse.Namespace) -> None:
    path = options.output or options.directory / "report.html"
    with working("report"):
        write_report(saved_source(options.directory), path)
    print(path)


def add_trace(parser: argparse.ArgumentParser) -> None:
    description = (
        "Writes the predicted step of a saved pipeline, and the measured one if a run was recorded there "
        "(fxpipe run --record), as trace events, which ui.perfetto.dev and chrome://tracing open."
    )
    _add(parser, _trace, description)
    parser.add_argument("-o", "--output", type=output, metavar="FILE.json", help="DIRECTORY/trace.json")


def _trace(options: argparse.Namespace) -> None:
    path = options.output or options.directory / "trace.json"
    with working("trace"):
        write_trace(saved_source(options.directory), path)
    print(path)
