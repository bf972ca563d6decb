"""``fxpipe draw``: the timeline of a saved pipeline's schedule, as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxpipe.cli.arguments import picture, write_picture
from fxpipe.cost.plan_costs import costs_of
from fxpipe.errors import printable
from fxpipe.plan.saved.files import read_plan
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.viz.timeline_picture import timeline_svg


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draws the simulated step of a saved pipeline: its ops, transfers and memory by rank."
    )
    parser.set_defaults(command=_draw)
    parser.add_argument("directory", type=Path, help="a saved pipeline")
    parser.add_argument("file", type=picture, help="the picture, .svg or .png")


def _draw(options: argparse.Namespace) -> None:
    plan = read_plan(options.directory)
    write_picture(options.file, timeline_svg(simulate(plan.ordered, costs_of(plan)), plan.model))
    print(printable(f"drawn: {options.file}"))
