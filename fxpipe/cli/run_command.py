"""``fxpipe run``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fxpipe.api import load
from fxpipe.cli.arguments import positive, positive_int
from fxpipe.errors import ArtifactError
from fxpipe.plan.files import taken
from fxpipe.training.loop import train


def add_to(commands: Any, line: str) -> None:
    parser = commands.add_parser(
        "run",
        help=line,
        description="Trains a saved pipeline: torchrun --nproc-per-node RANKS -m fxpipe run DIR --data FILE",
    )
    parser.set_defaults(command=_run)
    add = parser.add_argument
    add("directory", type=Path, help="what pipe.save wrote")
    add("--data", required=True, type=Path, metavar="FILE", help="safetensors, a tensor for each batch leaf")
    add("--steps", type=positive_int, metavar="N", help="(once through the data)")
    add("--lr", type=positive, default=3e-4, metavar="X", help="of AdamW (3e-4)")
    add("--clip-grad-norm", type=positive, metavar="X", help="of the whole model (no clipping)")
    add("--save", type=Path, metavar="DIR", help="save the trained pipeline there")
    add("--offload-directory", type=Path, metavar="DIR", help="where activations go, if it offloads to disk")
    add("--record", action="store_true", help="leave the last step's times in the directory, for simulate")


def _run(options: argparse.Namespace) -> None:
    problem = taken(options.save.absolute()) if options.save is not None else ""
    if problem:
        raise ArtifactError(problem)
    train(
        load(options.directory, offload_directory=options.offload_directory),
        options.data,
        steps=options.steps,
        lr=options.lr,
        clip=options.clip_grad_norm,
        record=options.directory if options.record else None,
        save=options.save,
    )
