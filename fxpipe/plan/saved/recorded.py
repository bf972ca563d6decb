"""The measured times of a run, in the directory of its pipeline: ``measured0.json`` …, one file per rank.

``{"spans": [["F0.0", start, end], …]}``: the ops of one step with their times in seconds.  Other entries
are ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from fxpipe.errors import ArtifactError, ScheduleError
from fxpipe.plan.artifact import Plan
from fxpipe.schedule.ops import Op, parse_op
from fxpipe.strict import MEBIBYTE, Mismatch, parse_json, read_text, refused, shown, structure

MOST_BYTES = 32 * MEBIBYTE

RankSpans = Sequence[tuple[str, float, float]]
"""The type of ``Record.spans`` of one rank."""


def write_spans(directory: Path, rank: int, spans: RankSpans) -> None:
    (directory / f"measured{rank}.json").write_text(json.dumps({"spans": spans}))


def read_spans(directory: Path, ranks: int) -> tuple[RankSpans, ...] | None:
    """The spans of every rank; None if no run was recorded.

    Raises ArtifactError for a file that cannot be read.
    """
    files = [directory / f"measured{rank}.json" for rank in range(ranks)]
    # A run that was stopped may have left the files of some ranks.
    if not all(map(os.path.exists, files)):
        return None
    spans = [_read(file) for file in files]
    # A rank that records nothing writes an empty list.
    return tuple(spans) if all(spans) else None


def _read(file: Path) -> RankSpans:
    with refused(ArtifactError, f"{file} is damaged:", "Record the run again, or remove it."):
        data = parse_json(read_text(file, MOST_BYTES))
        if not isinstance(data, dict):
            raise Mismatch(f"is {shown(data)} and must be an object with spans")
        spans = structure(data.get("spans") or [], tuple[tuple[str, float, float], ...], "spans")
        for k, (_, start, end) in enumerate(spans):
            # A clock that was set back would turn into negative times in pictures.
            if end < start:
                raise Mismatch(f"ends at {end}, before it starts, at {start}", f"spans[{k}]")
    return spans


def recorded_ops(plan: Plan, spans: Sequence[RankSpans]) -> tuple[tuple[tuple[Op, float, float], ...], ...]:
    """The ops of each rank with their times, on the clock of the rank.

    Raises ArtifactError if the spans do not belong to this plan.
    """
    return tuple(
        tuple((_op(plan, rank, name), start, end) for name, start, end in rank_spans)
        for rank, rank_spans in enumerate(spans)
    )


def _op(plan: Plan, rank: int, name: str) -> Op:
    try:
        op = parse_op(name)
    except ScheduleError as error:
        raise ArtifactError(f"measured{rank}.json is damaged: {error}. Record the run again.") from error
    if op.stage >= len(plan.placement) or plan.placement[op.stage] != rank:
        raise ArtifactError(
            f"measured{rank}.json holds {name}, which rank {rank} does not run. Record the run again."
        )
    return op
