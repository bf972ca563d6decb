"""``fxpipe run``: trains a saved pipeline under torchrun."""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TextIO

from fxpipe.api.load import load
from fxpipe.api.pipeline import Pipeline
from fxpipe.cli.arguments import output, positive, positive_int
from fxpipe.cli.run.data import Data, data_from
from fxpipe.cli.run.loop import DECAYS, LoopSettings, board_class, train
from fxpipe.errors import ArtifactError, RunError, printable
from fxpipe.plan.saved.files import check_free


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains a saved pipeline: torchrun --nproc-per-node RANKS -m fxpipe run DIR --data FILE. With a "
        "multiple of its ranks, replicas of it train together, each on its own rows of the data."
    )
    parser.set_defaults(command=_run)
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


def _run(options: argparse.Namespace) -> None:
    if options.tensorboard is not None:
        board_class()  # before ranks wait for each other
    if options.save is not None:
        check_free(options.save.absolute())
    if options.every is not None and options.checkpoints is None:
        raise ArtifactError("--every needs --checkpoints, the directory for them.")
    pipe = load(options.directory, offload_directory=options.offload_directory, timeout=options.timeout)
    _log_to(sys.stderr if options.json_lines else sys.stdout)
    options.record = options.directory if options.record else None
    settings = LoopSettings(**{each.name: getattr(options, each.name) for each in fields(LoopSettings)})
    with pipe.process.reported() if pipe.process is not None else nullcontext():
        data = _data(options.data, pipe)
        evaluated = None if options.evaluate is None else _data(options.evaluate, pipe.evaluation or pipe)
        _check_processes(pipe, options.directory)
        train(pipe, data, settings, evaluated)


def _check_processes(pipe: Pipeline, directory: Path) -> None:
    ranks = pipe.artifact.plan.ranks
    if ranks > 1 and pipe.process is None:
        raise RunError(
            f"{directory} has {ranks} ranks, and this is one process. Start it with "
            f"torchrun --nproc-per-node {ranks} -m fxpipe run {directory} …"
        )


def _data(where: str, pipe: Pipeline) -> Data:
    """The data that this process needs for a pipeline."""
    step, leaves = pipe.artifact.plan.step, None if pipe.process is None else pipe.leaves()
    replicas = 1 if pipe.process is None else pipe.replicas
    return data_from(where, step.batch, step.microbatches, leaves, pipe.replica, replicas)


def _log_to(stream: TextIO) -> None:
    """Log to a stream, without what is not printable in a terminal, which names of files may hold."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Printable("%(message)s"))
    logger = logging.getLogger("fxpipe.run")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
