"""The training loop of ``fxpipe run``: a loaded pipeline trained on the batches of a file or a loader."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress

from fxpipe.api.checkpointer import Checkpointer
from fxpipe.cli.options.run import DECAYS
from fxpipe.cli.run.data import Data
from fxpipe.errors import RunError
from fxpipe.plan.saved.files import writing
from fxpipe.plan.saved.recorded import write_spans
from fxpipe.schedule.units import bytes_text

if TYPE_CHECKING:
    from fxpipe.api.pipeline import Pipeline
    from fxpipe.plan.artifact import Validation

logger = logging.getLogger("fxpipe.run")


@dataclass(frozen=True)
class LoopSettings:
    """What a run of ``fxpipe run`` does; ``clip_grad_norm``, ``master_weights``, ``validation``: see
    ``Pipeline.optimizer``; ``every``, ``keep``: see Checkpointer."""

    steps: int | None
    """All steps, those of earlier runs included; None takes every whole batch once."""
    lr: float
    clip_grad_norm: float | None = None
    master_weights: bool = False
    validation: Validation | None = None
    warmup: int = 0
    """Steps in which the learning rate grows."""
    decay: str = "constant"
    """The course of the learning rate after that, to zero at the last step; one of ``DECAYS``."""
    checkpoints: Path | None = None
    """A directory; the run goes on from the newest one in it, and writes one at its end."""
    every: int | None = None
    keep: int = 3
    log_every: int = 1
    """Steps from one line of the log to the next."""
    evaluate_every: int | None = None
    """Steps from one evaluation to the next; None for one at the end."""
    record: Path | None = None
    """The directory for the times of the last step; see :mod:`fxpipe.plan.saved.recorded`."""
    save: Path | None = None
    """The directory for the trained pipeline."""
    tensorboard: Path | None = None
    """The directory for the figures of the log."""
    log_file: Path | None = None
    """The file to which these are appended, one JSON object a line."""
    json_lines: bool = False
    """Whether such lines are printed."""


def train(pipe: Pipeline, data: Data, settings: LoopSettings, evaluated: Data | None = None) -> None:
    """Train with AdamW; rank 0 logs.  All ranks must call it with the same arguments.

    evaluated: the data of evaluations, each of which takes every whole batch once.
    """
    batches = _batches(pipe, data)  # by all ranks, with --steps too: files must not differ
    steps = settings.steps or batches
    if steps is None:
        raise RunError("The length of the data is not known: give --steps.")
    evaluations = None if evaluated is None else _batches(pipe, evaluated)
    if evaluated is not None and evaluations is None:
        raise RunError("Evaluation takes every batch of its data once: give a safetensors file.")
    if evaluated is not None and pipe.evaluation is None:
        raise RunError(
            "The pipeline has no programs for evaluation: compile and save it with evaluation=True."
        )
    leads = pipe.process is None or pipe.process.leads
    if leads and pipe.process is not None and pipe.replicas > 1:
        logger.info("%d replicas x %d ranks", pipe.replicas, pipe.artifact.plan.ranks)
    optimizer = pipe.optimizer(
        torch.optim.AdamW,
        lr=settings.lr,
        clip_grad_norm=settings.clip_grad_norm,
        master_weights=settings.master_weights,
        validation=settings.validation,
    )
    with ExitStack() as stack:
        checkpoints = None
        if settings.checkpoints is not None:
            checkpoints = Checkpointer(
                pipe, settings.checkpoints, optimizer=optimizer, state=data.state, every=settings.every,
                keep=settings.keep,
            )  # fmt: skip
            stack.enter_context(checkpoints)
            if checkpoints.resume() and leads:
                logger.info("resumed after step %d", pipe.step_number - 1)
        log = stack.enter_context(_Log(settings, steps, pipe.step_number, shows=leads))
        begun = pipe.step_number
        # With "post" ranks do not wait for each other, nor does the log: its figures are known a step later.
        waits = (settings.validation or pipe.artifact.plan.validation) == "barrier"
        while pipe.step_number < steps:
            step = pipe.step_number
            loss = pipe.step(data.batch(step))
            log.settle()
            logs = step % settings.log_every == 0 or step == steps - 1
            # By the settings of this run, not those of the run that it resumes.
            lr = settings.lr * _factor(settings, step, steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            # A clipped step knows its own.
            begins = logs and settings.clip_grad_norm is None
            norm: Callable[[], Any] = (
                optimizer.begin_norm() if begins else partial(getattr, optimizer, "last_norm")
            )
            optimizer.step()
            optimizer.zero_grad()
            if logs:
                log.later(step, _begin_figures(pipe, {"loss": float(loss), "lr": lr}, norm))
            log.advance(step + 1)
            every = settings.evaluate_every
            is_due = step == steps - 1 or (every is not None and (step + 1) % every == 0)
            if waits or is_due:
                log.settle()
            if evaluated is not None and evaluations and is_due:
                log.add({"evaluation": evaluate(pipe, evaluated, evaluations)}, step)
            if checkpoints is not None:
                checkpoints.step()
        at_end = begun < steps and (settings.every is None or steps % settings.every != 0)
        if checkpoints is not None and at_end:
            checkpoints.save()
    if settings.record is not None and pipe.replica == 0 and begun < steps:
        write_spans(settings.record, pipe.runtime.rank, pipe.runtime.record.spans)
    if settings.save is not None:
        pipe.save(settings.save)
        if leads:
            logger.info("saved: %s", settings.save)


def evaluate(pipe: Pipeline, data: Data, batches: int) -> float:
    """The mean loss of the first batches."""
    return sum(float(pipe.evaluate(data.batch(k))) for k in range(batches)) / batches


def _batches(pipe: Pipeline, data: Data) -> int | None:
    """The number of whole batches; None if no rank knows it.  Raises RunError where it differs by rank."""
    if pipe.process is None:
        return data.once
    texts = pipe.process.gather(json.dumps(data.once).encode())
    known = {rank: json.loads(text) for rank, text in enumerate(texts) if text != b"null"}
    first = next(iter(known.values()), None)
    for rank, number in known.items():
        if number != first:
            raise RunError(
                f"Rank {rank} has {number} batches of data, and rank {min(known)} has {first}. Give all "
                "ranks the same rows."
            )
    return first


def _factor(settings: LoopSettings, step: int, steps: int) -> float:
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    left = max(1, steps - settings.warmup)
    return DECAYS[settings.decay](min(1.0, (step - settings.warmup) / left))


def _begin_figures(
    pipe: Pipeline, known: dict[str, float], norm: Callable[[], torch.Tensor]
) -> Callable[[], dict[str, float]]:
    """The known figures, the norm, and the figures of the last steps with the largest bubble of all ranks;
    given by a function that waits for the others."""
    figures = {name: figure for name, figure in pipe.figures().items() if name not in ("step", "norm")}
    # Its bits travel as a word: ``begin_gather`` takes whole numbers.
    idle = torch.tensor([figures.get("bubble", 0.0)], dtype=torch.float64)
    process = pipe.process
    gathered = (
        None if process is None else process.begin_gather(idle.view(torch.int64), "the log of fxpipe run")
    )

    def figures_of_all() -> dict[str, float]:
        first = {**known, "norm": float(norm())}
        all_idle = idle if gathered is None else gathered()[:, 0].contiguous().view(torch.float64)
        return first | figures | ({"bubble": float(all_idle.max())} if "bubble" in figures else {})

    return figures_of_all


_TEXTS: dict[str, Callable[[float], str]] = {
    "loss": "{:.6f}".format,
    "evaluation": "{:.6f}".format,
    "lr": "{:.2e}".format,
    "norm": "{:.3g}".format,
    "seconds": "{:.4g}".format,
    "MFU": "{:.1%}".format,
    "memory": bytes_text,
    "bubble": "{:.2%}".format,
    "predicted": "{:.2%}".format,
}


class _Log:
    """Shows figures in the log and, if asked to, in TensorBoard; a progress bar on terminals.

    shows: on rank 0 alone; with the others it gathers figures.
    """

    def __init__(self, settings: LoopSettings, steps: int, done: int, *, shows: bool):
        console = Console(stderr=True)
        self._progress = Progress(console=console, disable=not (shows and console.is_terminal))
        self._bar = self._progress.add_task("train", total=steps, completed=done)
        self._later: list[tuple[int, Callable[[], dict[str, float]]]] = []
        self._shows, self._prints = shows, settings.json_lines
        self._board, self._lines = None, None
        if shows and settings.tensorboard is not None:
            self._board = board_class()(str(settings.tensorboard))
        if shows and settings.log_file is not None:
            with writing(settings.log_file):
                self._lines = settings.log_file.open("a", encoding="utf-8")

    def __enter__(self) -> _Log:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._board is not None:
            self._board.close()
        if self._lines is not None:
            self._lines.close()

    def later(self, step: int, figures: Callable[[], dict[str, float]]) -> None:
        """Have ``settle`` add figures that wait for other ranks."""
        self._later.append((step, figures))

    def settle(self) -> None:
        for step, figures in self._later:
            self.add(figures(), step)
        self._later.clear()

    def add(self, figures: dict[str, float], step: int) -> None:
        if not self._shows:
            return
        texts = (f"{name} {_TEXTS.get(name, '{:,.0f}'.format)(value)}" for name, value in figures.items())
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        line = json.dumps({"step": step, "time": time.time(), **finite})
        if self._prints:
            print(line, flush=True)
        else:
            logger.info("step %d  %s", step, "  ".join(texts))
        if self._lines is not None:
            self._lines.write(line + "\n")
            self._lines.flush()  # a run that is killed leaves its lines
        if self._board is not None:
            for name, value in figures.items():
                self._board.add_scalar(name, value, step)

    def advance(self, done: int) -> None:
        self._progress.update(self._bar, completed=done)


def board_class() -> Any:
    """TensorBoard's writer.  Raises RunError where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RunError("--tensorboard needs TensorBoard: pip install 'fxpipe[tensorboard]'.") from error
    return SummaryWriter
