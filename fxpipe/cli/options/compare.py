"""Options of ``fxpipe compare``."""

from __future__ import annotations

import argparse

from fxpipe.cli.arguments import memory, picture
from fxpipe.cli.options.costs import add_cost_arguments
from fxpipe.schedule.offload.planner import AUTO
from fxpipe.schedule.ops import VALIDATIONS


def add_compare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Simulates every schedule on the same costs: bubbles, memory and time."
    parser.set_defaults(command="compare:compare_schedules")
    add_cost_arguments(parser)
    add = parser.add_argument
    add(
        "--objective",
        choices=("makespan", "span"),
        default="makespan",
        help=f"objective of {AUTO}, and the bubble in the picture",
    )
    add(
        "--validation",
        choices=VALIDATIONS,
        help=f"also show the time of a step of many; with post, it is the objective of {AUTO}",
    )
    add(
        "--limits",
        type=memory,
        nargs="+",
        default=(),
        metavar="X",
        help=f"also search with {AUTO} under each of these memory limits",
    )
    add("--draw", type=picture, metavar="FILE", help="draw bubble against memory, as .svg or .png")
    add("--json", action="store_true", help="print one JSON object")
