"""Options of ``fxpipe plan``."""

from __future__ import annotations

import argparse

from fxpipe.cli.arguments import named_length, non_negative, positive_int
from fxpipe.cli.options.of_compile import add_dimension, add_option, add_options
from fxpipe.cli.options.samples import add_lengths
from fxpipe.cost.devices.known_devices import device_names
from fxpipe.plan.step import SHARDS


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares meshes of ranks, replicas and lanes for a model on devices that need not be here. Nothing "
        "is allocated: the function runs with tensors on the meta device."
    )
    parser.set_defaults(command="plan:plan_meshes")
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="MODULE:FUNCTION",
        help="a Python function that returns (model, example), or (model, example, loss_fn)",
    )
    add("--device", required=True, metavar="NAME", help=f"one of: {', '.join(device_names())}")
    add_option(parser, "devices", type=positive_int, metavar="N")
    add_option(parser, "ranks", type=positive_int, metavar="P")
    add_option(parser, "replicas", type=positive_int, metavar="D")
    add("--nodes", type=positive_int, default=1, metavar="N", help="machines that have the devices (1)")
    add(
        "--lanes",
        type=_numbers,
        default=[1],
        metavar="N,…",
        help="numbers of lanes to compare, processes that share each rank's ops, as in 1,2,4,8 (1)",
    )
    add(
        "--parallelize",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="with --lanes: a function of (model, mesh) that distributes the model over the lanes, as "
        "fxpipe.integrations.transformers:parallelize does; several are compared",
    )
    add_option(parser, "batch", type=positive_int, metavar="ROWS")
    add_option(parser, "microbatches", type=positive_int, metavar="M")
    add_option(parser, "optimizer_bytes", type=non_negative, default=8.0, metavar="X")
    add_option(parser, "shard", choices=("auto", "none", *SHARDS), default="auto")
    add_options(parser)
    add_dimension(parser)
    add(
        "--size",
        type=named_length,
        action="append",
        default=[],
        metavar="NAME=N",
        help="also plan for this length of a named dimension, or for so many rows (microbatch=N), without "
        "tracing again",
    )
    add_lengths(parser, "of samples, of which steps are drawn for the fastest mesh: padded, and packed")
    add("--json", action="store_true", help="print one JSON object")


def _numbers(text: str) -> list[int]:
    numbers = [int(part) if part.isdigit() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers, as 1,2,4 is")
    return list(dict.fromkeys(numbers))
