"""``fxpipe report``: one HTML file about a saved pipeline (``viz/report/``)."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxpipe.cli.arguments import output, working
from fxpipe.viz.report.write import saved_source, write_report


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the timeline of all ranks with what each waits for, memory by kind, the graph, stages, "
        "links and candidates of a saved pipeline as one HTML file that needs no network; with the "
        "measured step, if one was recorded there (fxpipe run --record)."
    )
    parser.set_defaults(command=_report)
    parser.add_argument("directory", type=Path, help="a saved pipeline")
    parser.add_argument("-o", "--output", type=output, metavar="FILE.html", help="DIRECTORY/report.html")


def _report(options: argparse.Namespace) -> None:
    path = options.output or options.directory / "report.html"
    with working("report"):
        write_report(saved_source(options.directory), path)
    print(path)
