"""``fxpipe trace``: the step of a saved pipeline as trace events (``viz/trace.py``)."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxpipe.cli.arguments import output, working
from fxpipe.viz.report.write import saved_source
from fxpipe.viz.trace import write_trace


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the predicted step of a saved pipeline, and the measured one if a run was recorded there "
        "(fxpipe run --record), as trace events, which ui.perfetto.dev and chrome://tracing open."
    )
    parser.set_defaults(command=_trace)
    parser.add_argument("directory", type=Path, help="a saved pipeline")
    parser.add_argument("-o", "--output", type=output, metavar="FILE.json", help="DIRECTORY/trace.json")


def _trace(options: argparse.Namespace) -> None:
    path = options.output or options.directory / "trace.json"
    with working("trace"):
        write_trace(saved_source(options.directory), path)
    print(path)
