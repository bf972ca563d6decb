"""Timelines as columns of small integers, one list for each field: they compress to about a byte an op.

Times are counted in ticks, of which the longest step has ``TICKS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fxpipe.schedule.ops import Direction, OpKind
from fxpipe.schedule.simulation.steps import Interval
from fxpipe.schedule.simulation.timeline import ExchangeSpan, Span, TransferSpan
from fxpipe.viz.memory_kinds import MemoryChange, MemoryKind
from fxpipe.viz.waits import Cause, IdleWait, Passed

TICKS = 10_000_000
KINDS, CAUSES, HELD = list(OpKind), list(Cause), list(MemoryKind)


class Ticks:
    """Converts seconds to ticks; ``begin`` is tick 0."""

    def __init__(self, begin: float, seconds: float) -> None:
        self.begin, self.seconds = begin, (seconds or 1.0) / TICKS

    def __call__(self, time: float) -> int:
        return round((time - self.begin) / self.seconds)


def op_columns(spans: Sequence[Span], waits: Sequence[IdleWait], ticks: Ticks) -> dict[str, object]:
    """The ops of one rank.

    kind, cause: a digit for each op, a number in KINDS or CAUSES.  gap: ticks since the end of the op before.
    from_rank, from_position: of the op that gave the message which it waited for, as differences to its own.
    made: the ticks from the end of that op (or of the other cause) to the op's start.
    """
    # As differences of whole numbers, which compress well.
    ends = [ticks(span.end) for span in spans]
    starts = [ticks(span.start) for span in spans]
    return {
        "kind": "".join(str(KINDS.index(span.op.kind)) for span in spans),
        "stage": [span.op.stage for span in spans],
        "microbatch": [span.op.microbatch for span in spans],
        "gap": [start - end for start, end in zip(starts, [0, *ends][:-1], strict=True)],
        "length": [end - start for start, end in zip(starts, ends, strict=True)],
        "cause": "".join(str(CAUSES.index(wait.cause)) for wait in waits),
        "from_rank": [_given(wait, wait.rank) for wait in waits],
        "from_position": [_given(wait, wait.position - k) for k, wait in enumerate(waits)],
        "made": [start - ticks(wait.made) for start, wait in zip(starts, waits, strict=True)],
        "transfer": {k: str(wait.transfer) for k, wait in enumerate(waits) if wait.transfer is not None},
    }


def _given(wait: IdleWait, number: int) -> int:
    return number if wait.cause is Cause.MESSAGE else 0


def transfer_rows(spans: Sequence[TransferSpan], ticks: Ticks) -> list[list[object]]:
    """[1 for an offload, stage, microbatch, the phase that needs it, start, length] of each transfer."""
    return [
        [int(t.direction is Direction.OUT), t.stage, t.microbatch, str(t.user), ticks(s), ticks(e) - ticks(s)]
        for t, s, e in spans
    ]


def exchange_rows(spans: Sequence[ExchangeSpan], ticks: Ticks) -> list[list[object]]:
    """[what, stage, start, length] of each exchange with the other replicas, or between lanes."""
    return [[what, stage, ticks(start), ticks(end) - ticks(start)] for what, stage, start, end in spans]


def update_rows(updates: Sequence[Interval], ticks: Ticks) -> list[list[int]]:
    """[start, length] of the optimizer's update on each rank."""
    return [[ticks(start), ticks(end) - ticks(start)] for start, end in updates]


def passed_rows(passed: dict[int, Passed], peak: float, ticks: Ticks) -> list[list[object]]:
    """[position behind the gap, position of the op that was ready, since when, bytes live with it, whether
    these are above the peak]."""
    return [
        [position, other, ticks(ready), round(live), int(live > peak * (1 + 1e-9))]
        for position, (other, ready, live) in passed.items()
    ]


def change_columns(changes: Sequence[MemoryChange], ticks: Ticks) -> dict[str, object]:
    """The changes of one rank's memory; time: ticks since the one before."""
    times = [0, *(ticks(change.time) for change in changes)]
    return {
        "time": [b - a for a, b in pairwise(times)],
        "held": "".join(str(HELD.index(change.kind)) for change in changes),
        "stage": [change.stage for change in changes],
        "bytes": [round(change.bytes) for change in changes],
    }
