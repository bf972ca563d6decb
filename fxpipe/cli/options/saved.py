"""Options of what a saved pipeline tells: ``check``, ``explain``, ``draw``, ``report``, ``trace``."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxpipe.cli.arguments import output, picture
from fxpipe.cli.options.samples import add_samples


def _add(parser: argparse.ArgumentParser, command: str, description: str) -> None:
    parser.description = description
    parser.set_defaults(command=f"saved:{command}")
    parser.add_argument("directory", type=Path, help="a saved pipeline")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_check(parser: argparse.ArgumentParser) -> None:
    description = (
        "Runs the programs of all ranks on terms in the place of tensors, and compares the loss, each "
        "gradient, buffer and output with the captured step, for every microbatch."
    )
    _add(parser, "check", description)


def add_explain(parser: argparse.ArgumentParser) -> None:
    _add(
        parser,
        "explain_choice",
        "Lists the candidates of schedule='auto' for a saved pipeline, fastest first.",
    )
    add_samples(parser, "of samples: what steps of them take, padded or packed")


def add_draw(parser: argparse.ArgumentParser) -> None:
    description = "Draws the simulated step of a saved pipeline: its ops, transfers and memory by rank."
    _add(parser, "draw", description)
    parser.add_argument("file", type=picture, help="the picture, .svg or .png")


def add_report(parser: argparse.ArgumentParser) -> None:
    description = (
        "Writes the timeline of all ranks with what each waits for, memory by kind, the graph, stages, "
        "links and candidates of a saved pipeline as one HTML file that needs no network; with the "
        "measured step, if one was recorded there (fxpipe run --record)."
    )
    _add(parser, "report", description)
    add_samples(parser, "of samples, whose distribution the page has: what steps of them take")
    parser.add_argument("-o", "--output", type=output, metavar="FILE.html", help="DIRECTORY/report.html")


def add_trace(parser: argparse.ArgumentParser) -> None:
    description = (
        "Writes the predicted step of a saved pipeline, and the measured one if a run was recorded there "
        "(fxpipe run --record), as trace events, which ui.perfetto.dev and chrome://tracing open."
    )
    _add(parser, "trace", description)
    parser.add_argument("-o", "--output", type=output, metavar="FILE.json", help="DIRECTORY/trace.json")
