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
from fxpipe.cli.run.data import Data, data_from
from fxpipe.cli.run.loop import LoopSettings, board_class, train
from fxpipe.errors import ArtifactError, RunError, printable
from fxpipe.plan.saved.files import check_free


def run(options: argparse.Namespace) -> None:
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
