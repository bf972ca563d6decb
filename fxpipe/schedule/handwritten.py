"""Schedules that people write, from text.

Two formats, told apart by their first op.  The one of :func:`fxpipe.schedule.ops.order_text`, one line a
rank, with lines that begin with ``#`` for notes::

    F0.0 F0.1 BW0.0 BW0.1
    F1.0 BW1.0 F1.1 BW1.1

and the CSV that the schedules of ``torch.distributed.pipelining`` load and dump, see
:mod:`fxpipe.schedule.torch_csv`.  Neither says where a stage lives: that is read off.
"""

from __future__ import annotations

from pathlib import Path

from fxpipe.errors import ScheduleError
from fxpipe.schedule.check import check
from fxpipe.schedule.ops import Order, Schedule, order_text, parse_order
from fxpipe.schedule.torch_csv import csv_text, looks_like_csv, parse_csv
from fxpipe.strict import MEBIBYTE, Misfit, read_text

MOST_BYTES = 16 * MEBIBYTE


def read_schedule(path: Path | str) -> Schedule:
    """The schedule in a file of either format, named after the file.

    Raises ScheduleError where the file cannot be read, or as :func:`parse_schedule` does.
    """
    path = Path(path)
    try:
        text = read_text(path, MOST_BYTES)
    except Misfit as error:
        raise ScheduleError(
            f"schedule file {path} {error}. Name a file as docs/schedules.md describes."
        ) from error
    return parse_schedule(text, path.stem)


def parse_schedule(text: str, name: str) -> Schedule:
    """The schedule that a text of either format holds; stages and microbatches are counted from 0.

    Raises ScheduleError, naming op and rank, where an op is none, is missing, repeated or before one that
    it needs on its own stage, or where a stage runs on two ranks.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(line for line in lines if line.strip(" \t,"))
    order = parse_csv(text) if looks_like_csv(text) else parse_order(text)
    if not any(order):
        raise ScheduleError(f"schedule {name}: there is no op in it")
    for rank, ops in enumerate(order):
        if not ops:
            raise ScheduleError(f"schedule {name}: there is no op in the line of rank {rank}")
    microbatches = 1 + max(op.microbatch for ops in order for op in ops)
    schedule = Schedule(name, _placement(name, order), microbatches, order)
    check(schedule)
    return schedule


def write_text(schedule: Schedule, path: Path) -> None:
    """One line a rank, as :func:`read_schedule` reads it."""
    path.write_text(order_text(schedule.order) + "\n")


def write_csv(schedule: Schedule, path: Path) -> None:
    """The CSV that torch's ``_load_csv(path, format="compute_only")`` reads, and :func:`read_schedule`."""
    path.write_text(csv_text(schedule.order), newline="")


def _placement(name: str, order: Order) -> tuple[int, ...]:
    rank_of_stage: dict[int, int] = {}
    for rank, ops in enumerate(order):
        for op in ops:
            holder = rank_of_stage.setdefault(op.stage, rank)
            if holder != rank:
                raise ScheduleError(
                    f"schedule {name}: rank {rank} runs {op}, but stage {op.stage} is on rank {holder}, "
                    "which runs ops of it as well"
                )
    stages = 1 + max(rank_of_stage)
    for stage in range(stages):
        if stage not in rank_of_stage:
            raise ScheduleError(
                f"schedule {name}: no rank runs stage {stage}, and there are ops of stage {stages - 1}"
            )
    return tuple(rank_of_stage[stage] for stage in range(stages))
