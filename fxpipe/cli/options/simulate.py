"""Options of ``fxpipe simulate``."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxpipe.cli.arguments import non_negative, picture, positive, positive_int, share
from fxpipe.cli.options.costs import add_cost_arguments
from fxpipe.cli.options.samples import add_samples
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.offload.planner import AUTO, FULL, HALF
from fxpipe.schedule.ops import VALIDATIONS


def add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Predicts times, bubbles and memory of a schedule."
    parser.set_defaults(command="simulate:simulate_schedule")
    add = parser.add_argument
    add(
        "--schedule",
        metavar="NAME",
        help=f"one of: {', '.join((*FAMILIES, AUTO))}; or a file, as for --schedule-file",
    )
    add("--schedule-file", type=Path, metavar="FILE", help="a schedule as text or as torch's CSV")
    add_cost_arguments(parser)
    add(
        "--objective",
        choices=("makespan", "span"),
        default="makespan",
        help=f"objective of {AUTO} and --exact",
    )
    add(
        "--validation",
        choices=VALIDATIONS,
        default="barrier",
        help="when the ranks update: with post, searches are for the shortest time a step of many",
    )
    add(
        "--exact",
        type=positive,
        nargs="?",
        const=60.0,
        metavar="SECONDS",
        help="also search for the optimal schedule within the same memory, for at most SECONDS (default 60)",
    )
    add(
        "--offload-time",
        type=non_negative,
        metavar="K",
        help="activations can be offloaded; one microbatch's take K times TF + TB + TW, one way",
    )
    add(
        "--offload",
        type=_share,
        metavar="HOW",
        help="po-h (half of them), po-f (all; the default), a share, or auto (as the memory limit requires)",
    )
    add(
        "--ranks-per-link",
        type=positive_int,
        metavar="N",
        help="number of neighboring ranks that share a link (default 1)",
    )
    add_samples(
        parser,
        "of the microbatches of a batch, with --costs of a saved pipeline whose dimension has a name: the "
        "order that pipe.step runs for them; of samples with --tokens or --samples, or of a distribution",
    )
    add("--draw", type=picture, metavar="FILE", help="write the timeline as a picture, .svg or .png")
    add("--steps", type=positive_int, default=1, metavar="N", help="that the picture shows (1)")
    add("--json", action="store_true", help="print one JSON object")


def _share(text: str) -> float | str:
    named: dict[str, float | str] = {"po-h": HALF, "po-f": FULL, AUTO: AUTO}
    return named[text] if text in named else share(text)
