"""Reads and writes schedules as text, for schedules written by hand or by other tools.

There are two formats; the first op of a text decides which one it is.  The format of
:func:`fxpipe.schedule.ops.order_text` has one line per rank; lines that begin with ``#`` are comments::

    F0.0 F0.1 BW0.0 BW0.1
    F1.0 BW1.0 F1.1 BW1.1

The other format is the CSV that the schedules of ``torch.distributed.pipelining`` load and dump, see
``torch_csv.py``.  In both the placement follows from the ranks that run a stage's ops.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeGuard

from fxpipe.errors import ScheduleError
from fxpipe.schedule.check import check
from fxpipe.schedule.formats.torch_csv import looks_like_csv, parse_csv
from fxpipe.schedule.ops import RankOps, Schedule, parse_order
from fxpipe.strict import MEBIBYTE, read_text, refused

MOST_BYTES = 16 * MEBIBYTE


def is_file_name(schedule: object) -> TypeGuard[str | Path]:
    """Whether this is the path of a schedule: a Path, or a text with a folder or a suffix in it."""
    return isinstance(schedule, Path) or (
        isinstance(schedule, str) and (os.sep in schedule or bool(Path(schedule).suffix))
    )


def read_schedule(path: Path | str) -> Schedule:
    """Read the schedule from a file of either format; it gets the name of the file.

    Raises ScheduleError if the file cannot be read, or as :func:`parse_schedule` does.
    """
    path = Path(path)
    with refused(ScheduleError, f"schedule file {path}", "docs/simulate.md describes the two formats."):
        text = read_text(path, MOST_BYTES)
    try:
        return parse_schedule(text, path.stem)
    except ScheduleError as error:
        raise ScheduleError(f"schedule file {path}: {error}") from error


def parse_schedule(text: str, name: str) -> Schedule:
    """Parse a schedule from a text of either format; stages and microbatches are counted from 0.

    Raises ScheduleError, naming op and rank, if a text is not an op, an op is missing, repeated or earlier
    than an op of its own stage that it needs, or if a stage runs on two ranks.
    """
    text = text.removeprefix("\ufeff")  # a byte order mark, as spreadsheets write it
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(line for line in lines if line.strip(" \t,"))
    order = parse_csv(text) if looks_like_csv(text) else parse_order(text)
    if not any(order):
        raise ScheduleError(f"schedule {name} has no ops: write one line of ops for each rank")
    for rank, ops in enumerate(order):
        if not ops:
            raise ScheduleError(
                f"schedule {name}: the line of rank {rank} has no ops: every rank needs a stage"
            )
    microbatches = 1 + max(op.microbatch for ops in order for op in ops)
    schedule = Schedule(name, _placement(name, order), microbatches, order)
    check(schedule)
    return schedule


def _placement(name: str, order: RankOps) -> tuple[int, ...]:
    rank_of_stage: dict[int, int] = {}
    for rank, ops in enumerate(order):
        for op in ops:
            holder = rank_of_stage.setdefault(op.stage, rank)
            if holder != rank:
                raise ScheduleError(
                    f"schedule {name}: rank {rank} runs {op}, but rank {holder} also runs ops of stage "
                    f"{op.stage}: all ops of a stage must be on one rank"
                )
    stages = 1 + max(rank_of_stage)
    for stage in range(stages):
        if stage not in rank_of_stage:
            raise ScheduleError(
                f"schedule {name}: no rank runs stage {stage}, but there are ops of stage {stages - 1}: "
                "number the stages from 0, without gaps"
            )
    return tuple(rank_of_stage[stage] for stage in range(stages))
