"""What a saved pipeline tells: ``fxpipe check``, ``explain``, ``draw``, ``report`` and ``trace``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from fxpipe.certificate.check import check_artifact
from fxpipe.certificate.problems import Certificate, Problem
from fxpipe.cli.arguments import working, write_picture
from fxpipe.cli.batch import needs_lengths, ways_of
from fxpipe.cli.ways import print_ways, ways_as_json, ways_as_page
from fxpipe.cost.batch_order import BatchPlanner
from fxpipe.cost.plan_costs import costs_of
from fxpipe.errors import RunError, printable
from fxpipe.plan.artifact import Artifact
from fxpipe.plan.libraries import import_libraries
from fxpipe.plan.saved.files import CAPTURED, directories, read_beside, read_plan, read_programs
from fxpipe.runtime.program import lanes as lanes  # registers ops that a captured step may have
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.units import units_of
from fxpipe.viz.explanation import explain
from fxpipe.viz.report.write import saved_source, write_report
from fxpipe.viz.timeline_picture import timeline_svg
from fxpipe.viz.trace import write_trace


def check(options: argparse.Namespace) -> None:
    certificates: dict[Path, Certificate] = {}
    for directory in directories(options.directory):
        with working("check"):
            certificates[directory] = certificate = _certificate(directory)
        if not options.json:
            print("\n".join(printable(line) for line in [f"{directory}:", *str(certificate).splitlines()]))
    if options.json:
        print(json.dumps([_as_json(*each) for each in certificates.items()]))
    if not all(each.holds for each in certificates.values()):
        raise RunError("The programs are not proved to be the captured step.")


def _as_json(directory: Path, certificate: Certificate) -> dict[str, object]:
    def rows(problems: Iterable[Problem]) -> list[dict[str, object]]:
        return [{"rank": each.rank, "line": each.line, "text": each.text} for each in problems]

    problems = {"problems": rows(certificate.problems), "otherwise": rows(certificate.otherwise)}
    return {"directory": str(directory), "holds": certificate.holds, **problems}


def _certificate(directory: Path) -> Certificate:
    """The check of a saved pipeline's programs, which needs neither its weights nor processes.

    Imports the modules that the plan names for ops of other libraries.
    Raises ArtifactError for missing or damaged files, or ops; RunError for those of an earlier version.
    """
    plan = read_plan(directory)
    import_libraries(plan.libraries, str(directory))
    programs = read_programs(directory, plan, range(plan.ranks))
    artifact = Artifact(plan, programs, {}, plan.number, captured=read_beside(directory, CAPTURED))
    return check_artifact(artifact, str(directory / CAPTURED))


def explain_choice(options: argparse.Namespace) -> None:
    plan = read_plan(options.directory)
    needs_lengths(options)
    ways = None if options.lengths is None else ways_of(options, plan, BatchPlanner.of(plan))
    if not options.json:
        console = Console(markup=False, emoji=False)
        explain(plan, console)
        if ways is not None:
            print_ways(console, options.lengths, options.seed, *ways, units_of(plan.memory_limit))
        return
    record: dict[str, object] = {
        "schedule": plan.schedule,
        "device": plan.device,
        "prediction": asdict(plan.prediction),
        "candidates": [asdict(each) for each in plan.tried],
        "meshes": [asdict(each) for each in plan.meshes],
        "rewrites": [asdict(each) for each in plan.rewrites],
    }
    if ways is not None:
        record |= ways_as_json(options.lengths, options.seed, *ways)
    print(json.dumps(record))


def draw(options: argparse.Namespace) -> None:
    plan = read_plan(options.directory)
    write_picture(options.file, timeline_svg(simulate(plan.ordered, costs_of(plan)), plan.model))
    _written(options, options.file, f"drawn: {options.file}")


def _written(options: argparse.Namespace, file: Path, text: str) -> None:
    print(json.dumps({"file": str(file)}) if options.json else printable(text))


def report(options: argparse.Namespace) -> None:
    path, lengths = options.output or options.directory / "report.html", None
    needs_lengths(options)
    with working("report"):
        source = saved_source(options.directory)
        if options.lengths is not None:
            ways = ways_of(options, source.plan, BatchPlanner.of(source.plan))
            lengths = ways_as_page(options.lengths, options.seed, *ways)
        write_report(source, path, lengths)
    _written(options, path, str(path))


def trace(options: argparse.Namespace) -> None:
    path = options.output or options.directory / "trace.json"
    with working("trace"):
        write_trace(saved_source(options.directory), path)
    _written(options, path, str(path))
