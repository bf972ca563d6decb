"""Options of ``simulate`` and ``compare``: the costs."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxpipe.cli.arguments import memory, non_negative, positive, positive_int, share
from fxpipe.schedule.placement import PLACEMENTS

_EPILOG = (
    "Times are per microbatch and per rank: a chunk of V costs 1/V of them. Memory, and its limit, is in "
    "units of one microbatch's activations on one rank; with --costs, in the unit of the file (bytes for a "
    "saved pipeline). A limit is of each rank. docs/simulate.md describes the files."
)


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("--ranks", type=positive_int, metavar="P", help="that a step runs on")
    add("--microbatches", type=positive_int, metavar="M", help="of a step")
    add("--forward", type=positive, metavar="TF", help="seconds, or any unit of time")
    add("--backward-input", type=positive, metavar="TB", help="the same of the gradients of activations")
    add("--backward-weight", type=positive, metavar="TW", help="and of those of weights")
    add("--comm", type=non_negative, metavar="TC", help="one transfer between two ranks (0)")
    add("--inter-comm", type=non_negative, metavar="TC", help="one transfer between two machines (as --comm)")
    add(
        "--ranks-per-machine",
        type=positive_int,
        metavar="N",
        help="the first N ranks share a machine, and so on (one machine has all)",
    )
    add("--update", type=non_negative, metavar="TU", help="the optimizer's update of a rank (0)")
    add(
        "--verdict",
        type=non_negative,
        metavar="TV",
        help="one message in which a rank tells another one whether its gradients are right (0)",
    )
    add(
        "--weight-memory",
        type=share,
        metavar="X",
        help="share of the activations that W still needs (1: B frees nothing)",
    )
    add(
        "--costs",
        type=Path,
        metavar="PATH",
        help="instead of times: a JSON file, or the directory of a saved pipeline "
        "(with the times of a recorded run, if one was left there)",
    )
    add(
        "--device",
        metavar="NAME",
        help='with --costs of a pipeline that knows its dimensions: the times on this device, such as "H100"',
    )
    add(
        "--vocab-time",
        type=positive,
        metavar="TV",
        help="what every rank spends on its share of an output layer that is spread over all",
    )
    add(
        "--vocab-barriers", type=int, choices=(1, 2), help="how often the ranks wait for each other in it (1)"
    )
    add("--stages-per-rank", type=positive_int, metavar="V", help="chunks a rank holds (what suits)")
    add("--placement", choices=sorted(PLACEMENTS), help="of the chunks on the ranks (what suits)")
    add("--memory-limit", type=memory, metavar="X", help="of activations: a number, or 16GiB (none)")
    add("--effort", type=positive, metavar="S", help="of a search: about the seconds of one core (8 at most)")
