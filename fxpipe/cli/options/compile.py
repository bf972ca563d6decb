"""Options of ``fxpipe compile``."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxpipe.cli.arguments import positive_int
from fxpipe.cli.options.of_compile import add_dimension, add_option, add_options


def add_compile(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compiles a model for so many ranks and saves the pipeline, for fxpipe run, explain, report and "
        "check. A script may have more options: fxpipe.compile."
    )
    parser.set_defaults(command="compile:compile_model")
    add = parser.add_argument
    add(
        "model",
        metavar="MODULE:FUNCTION",
        help="a Python function that returns (model, example), or (model, example, loss_fn); the example is "
        "one microbatch",
    )
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="the directory of the pipeline")
    add("--overwrite", action="store_true", help="take the place of a pipeline that was saved there")
    add_option(parser, "ranks", type=positive_int, required=True, metavar="P")
    add_option(parser, "replicas", type=positive_int, metavar="D")
    number = "the number of microbatches of each replica"
    add_option(parser, "microbatches", type=positive_int, required=True, metavar="M", help=number)
    add_option(parser, "stages_per_rank", type=positive_int, metavar="V")
    add_option(parser, "shard", choices=("optimizer", "gradients", "parameters", "auto"))
    offload = (
        "move saved activations out until the backward needs them: as many as --memory-limit requires, or all"
    )
    add_option(parser, "offload", choices=("auto", "all"), help=offload)
    add_options(parser)
    add_option(parser, "costs", default="analytic", metavar="NAME")
    add_dimension(parser)
    add_option(parser, "evaluation", action="store_true")
    add("--json", action="store_true", help="print one JSON object: the directory and what is predicted")
