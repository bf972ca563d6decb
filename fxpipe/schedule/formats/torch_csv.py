"""The CSV of torch's pipeline schedules: one row per rank, one action per cell; empty cells are pauses.

An action is stage, kind, microbatch: ``3F0``.  torch's kinds are ``F``, ``I`` (input gradient, here B), ``W``
(weight gradient) and ``B`` (both, here BW).  ``(1F4;2B0)OVERLAP_F_B`` is two overlapped actions, which become
two ops, one after the other.  Actions that only move or shard tensors (``3SEND_F0``, ``1UNSHARD``) are
skipped: fxpipe makes its own messages.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from fxpipe.errors import ScheduleError
from fxpipe.schedule.ops import NUMBER, Op, OpKind, RankOps
from fxpipe.strict import shown

_KINDS = {"F": OpKind.F, "I": OpKind.B, "W": OpKind.W, "B": OpKind.BW}
_COMPUTE = re.compile(rf"({NUMBER})([FIWB])({NUMBER})")
_MOVES = re.compile(r"[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")
_TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def looks_like_csv(text: str) -> bool:
    """Whether a text begins with one of torch's actions."""
    first = text.lstrip(", \t\r\n")[:1]
    return bool(re.match(r"[0-9(]", first))


def parse_csv(text: str) -> RankOps:
    """Parse the ops of each rank.  Raises ScheduleError, naming row and cell, unless a cell is an action."""
    try:
        return tuple(
            tuple(op for cell in row for op in _ops(cell.strip(), f"row {number}"))
            for number, row in enumerate(csv.reader(io.StringIO(text)))
        )
    except csv.Error as error:
        raise ScheduleError(f"the schedule is not valid CSV: {error}") from error


def _ops(cell: str, where: str) -> Iterator[Op]:
    if together := _TOGETHER.fullmatch(cell):
        for part in together[1].split(";"):
            yield from _ops(part.strip(), where)
    elif action := _COMPUTE.fullmatch(cell):
        yield Op(_KINDS[action[2]], int(action[1]), int(action[3]))
    elif cell and not _MOVES.fullmatch(cell):
        raise ScheduleError(
            f"{where}: {shown(cell)} is not an action of torch's: write stage, kind (F, I, W or B), "
            "microbatch, such as 3F0, with numbers of at most 9 digits"
        )
