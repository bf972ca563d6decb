"""Options of ``fxpipe run``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from fxpipe.cli.arguments import output, positive, positive_int

#: The learning rate, as a factor, where ``done`` of the steps after the warm-up have been made, from 0 to 1.
DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains a saved pipeline: torchrun --nproc-per-node RANKS -m fxpipe run DIR --data FILE. With a "
        "multiple of its ranks, replicas of it train together, each on its own rows of the data."
    )
    parser.set_defaults(command="run.run_command:run")
    add = parser.add_argument
    add("directory", type=Path, help="a saved pipeline")
    add(
        "--data",
        required=True,
        metavar="FILE",
        help="safetensors file with one tensor for each input of the batch, or MODULE:FUNCTION, a Python "
        "function that returns an iterable of batches (of several replicas it takes replica= and replicas=)",
    )
    add("--steps", type=positive_int, metavar="N", help="number of steps (default: once through the data)")
    add("--lr", type=positive, default=3e-4, metavar="X", help="learning rate of AdamW (default 3e-4)")
    add("--warmup", type=positive_int, default=0, metavar="N", help="steps in which the learning rate grows")
    add("--decay", choices=sorted(DECAYS), default="constant", help="of the learning rate after that")
    add(
        "--clip-grad-norm",
        type=positive,
        metavar="X",
        help="clip the gradient norm of the whole model (default: no clipping)",
    )
    add(
        "--master-weights",
        action="store_true",
        help="update float32 copies of parameters with fewer bits",
    )
    add(
        "--validation",
        choices=("barrier", "post"),
        help="how ranks agree on an update that --clip-grad-norm may change; with post the log is a step "
        "late (default: as the pipeline was compiled)",
    )
    add(
        "--checkpoints",
        type=Path,
        metavar="DIR",
        help="directory of checkpoints: the run resumes from the newest, and writes one at its end",
    )
    add("--every", type=positive_int, metavar="N", help="also write one after every N steps")
    add("--keep", type=positive_int, default=3, metavar="N", help="number of checkpoints to keep (3)")
    add("--log-every", type=positive_int, default=1, metavar="N", help="steps from one line to the next (1)")
    add("--evaluate", metavar="FILE", help="data for evaluation, of a pipeline compiled with evaluation=True")
    add(
        "--evaluate-every",
        type=positive_int,
        metavar="N",
        help="steps from one evaluation to the next (default: once, at the end)",
    )
    add(
        "--log-file",  # torchrun refuses --log, which could be its --log-dir
        type=output,
        metavar="FILE.jsonl",
        help="append the figures of the log, one object a line",
    )
    add(
        "--json",
        action="store_true",
        dest="json_lines",
        help="print the figures of the log, one JSON object a line, and all else on stderr",
    )
    add("--tensorboard", type=Path, metavar="DIR", help="write the figures of the log for TensorBoard")
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
        help="write the times of the last step to the pipeline's directory, for fxpipe report and simulate",
    )
