"""``fxpipe compile``: a model, as a function of the user's gives it, saved as a pipeline."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any, cast

from fxpipe.api.arguments import Arguments
from fxpipe.api.compile import compile as compile_pipeline
from fxpipe.cli.arguments import positive_int
from fxpipe.cli.option_of_compile import add_dimension, add_option, add_options, options_of
from fxpipe.cli.run.model_function import model_from
from fxpipe.errors import OptionError, printable
from fxpipe.plan.memory import rank_memory
from fxpipe.plan.saved.files import check_free, check_writable
from fxpipe.runtime.job.process import under_torchrun


def add_compile(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compiles a model for so many ranks and saves the pipeline, for fxpipe run, explain, report and "
        "check. A script may have more options: fxpipe.compile."
    )
    parser.set_defaults(command=_compile)
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


def _compile(options: argparse.Namespace) -> None:
    if under_torchrun():
        raise OptionError(
            "fxpipe compile runs in one process; torchrun -m fxpipe run trains what it has saved."
        )
    check_free(options.output, options.overwrite, "--overwrite")  # before anything long begins
    check_writable(options.output)
    model, example, loss_fn = model_from(options.model)
    pipe = compile_pipeline(
        model,
        cast(Any, example),  # compile looks at it
        loss_fn=loss_fn,
        dimensions=dict(options.dimension) or None,
        **options_of(options, Arguments),
    )
    pipe.save(options.output, overwrite=options.overwrite)
    if options.json:
        plan = pipe.plan
        predicted = plan.prediction
        record = {
            "directory": str(options.output),
            "model": plan.model,
            "ranks": plan.ranks,
            "replicas": plan.replicas,
            "microbatches": plan.step.microbatches,
            "stages": len(plan.stages),
            "schedule": plan.schedule,
            "seconds": predicted.seconds,
            "span_bubble": predicted.span_bubble,
            "memory": [each.peak for each in rank_memory(plan, predicted.peak_memory)],
        }
        print(json.dumps(record))
        return
    print(*map(printable, repr(pipe).splitlines()), sep="\n")
    directory = shlex.quote(str(options.output))
    processes = pipe.plan.ranks * pipe.plan.replicas
    print(printable(f"saved: {options.output}"))
    print(
        f"train it: torchrun --nproc-per-node {processes} -m fxpipe run {directory} --data FILE.safetensors"
    )
