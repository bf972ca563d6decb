"""``fxpipe compile``: a model, as a function of the user's gives it, saved as a pipeline."""

from __future__ import annotations

import argparse
import json
import shlex
from typing import Any, cast

from fxpipe.api.arguments import Arguments
from fxpipe.api.compile import compile as compile_pipeline
from fxpipe.cli.option_of_compile import options_of
from fxpipe.cli.run.model_function import model_from
from fxpipe.errors import OptionError, printable
from fxpipe.plan.memory import rank_memory
from fxpipe.plan.saved.files import check_free, check_writable
from fxpipe.runtime.job.process import under_torchrun


def compile_model(options: argparse.Namespace) -> None:
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
