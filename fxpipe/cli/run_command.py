"""``fxpipe run``: trains a saved pipeline under torchrun."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fxpipe.api import load
from fxpipe.cli.arguments import positive, positive_int
from fxpipe.errors import ArtifactError
from fxpipe.plan.files import taken
from fxpipe.runtime.process import reported
from fxpipe.training.loop import train


def add_to(commands: Any, line: str) -> None:
    parser = commands.add_parser(
        "run",
        help=line,
        description="Trains a saved pipeline: torchrun --nproc-per-node RANKS -m fxpipe run DIR --data FILE",
    )
    parser.set_defaults(command=_run)
    add = parser.add_argument
    add("directory", type=Path, help="a saved pipeline")
    add(
        "--data",
        required=True,
        type=Path,
        metavar="FILE",
        help="safetensors file with one tensor for each input of the batch",
    )
    add("--steps", type=positive_int, metavar="N", help="number of steps (default: once through the data)")
    add("--lr", type=positive, default=3e-4, metavar="X", help="learning rate of AdamW (default 3e-4)")
    add(
        "--clip-grad-norm",
        type=positive,
        metavar="X",
        help="clip the gradient norm of the whole model (default: no clipping)",
    )
    add("--save", type=Path, metavar="DIR", help="save the trained pipeline to this directory")
    add(
        "--offload-directory",
        type=Path,
        metavar="DIR",
        help="directory for activations that are offloaded to disk",
    )
    add(
        "--timeout",
        type=positive,
        metavar="SECONDS",
        help="longest time that a rank waits for another one (default: 600)",
    )
    add(
        "--record",
        action="store_true",
        help="write the times of the last step to the pipeline's directory, for fxpipe simulate",
    )


def _run(options: argparse.Namespace) -> None:
    problem = taken(options.save.absolute()) if options.save is not None else ""
    if problem:
        raise ArtifactError(problem)
    pipe = load(options.directory, offload_directory=options.offload_directory, timeout=options.timeout)
    with reported(pipe.process):
        train(
            pipe,
            options.data,
            steps=options.steps,
            lr=options.lr,
            clip=options.clip_grad_norm,
            record=options.directory if options.record else None,
            save=options.save,
        )
