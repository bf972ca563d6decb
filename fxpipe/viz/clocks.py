"""Puts the clocks of a recorded step's ranks on one axis.

Ranks of one machine share a clock; those of several machines count from different moments.  No message can
arrive before its sender has begun the op that gives it, which bounds the difference of two clocks from both
sides: forwards go down the ranks, gradients come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from fxpipe.schedule.dependencies import needs
from fxpipe.schedule.simulation.timeline import Span, Timeline
from fxpipe.viz.waits import runs


def aligned(timeline: Timeline, spans: Sequence[Sequence[Span]]) -> tuple[tuple[Span, ...], ...]:
    """The measured spans of each rank on rank 0's clock, from 0 on.

    timeline: of the same ops, for what they need of each other.
    Clocks by which every message arrives after its op began are left as they are.  Else each rank's clock is
    set to the middle of what its messages permit.
    """
    bounds = _bounds(timeline, spans)
    shifts = [0.0] * len(spans) if all(b <= 0 for b in bounds.values()) else _middles(len(spans), bounds)
    moved = [[Span(op, s + by, e + by) for op, s, e in row] for row, by in zip(spans, shifts, strict=True)]
    begin = min((row[0].start for row in moved if row), default=0.0)
    return tuple(tuple(Span(op, s - begin, e - begin) for op, s, e in row) for row in moved)


def _bounds(timeline: Timeline, spans: Sequence[Sequence[Span]]) -> dict[tuple[int, int], float]:
    """The least that must be added to the clock of b beside that of a, by (a, b)."""
    table = needs(timeline.costs, timeline.schedule.placement)
    ran = runs(spans)
    bounds: dict[tuple[int, int], float] = {}
    for rank, row in enumerate(spans):
        for op, start, _ in row:
            for section, _ in table[op.kind][op.stage]:
                home, _, giver = ran[section, op.microbatch]
                if home != rank:
                    # Not from its end: how long the message was on its way is not known, and less than
                    # nothing it was not.
                    least = giver.start - start
                    bounds[home, rank] = max(bounds.get((home, rank), -inf), least)
    return bounds


def _middles(ranks: int, bounds: dict[tuple[int, int], float]) -> list[float]:
    """Per rank the middle between the earliest and the latest clock; rank 0 keeps its own."""
    earliest = _longest(ranks, bounds)
    # Backwards, the same bounds say how late a clock may be at most.
    latest = _longest(ranks, {(b, a): bound for (a, b), bound in bounds.items()})
    return [
        0.0 if -inf in (low, high) else (low - high) / 2 for low, high in zip(earliest, latest, strict=True)
    ]


def _longest(ranks: int, bounds: dict[tuple[int, int], float]) -> list[float]:
    """The longest way from rank 0 to each; as many rounds as ranks, as noise may leave a circle."""
    longest = [0.0, *[-inf] * (ranks - 1)]
    for _ in range(ranks):
        for (a, b), bound in bounds.items():
            # Rank 0 keeps its clock.
            if b:
                longest[b] = max(longest[b], longest[a] + bound)
    return longest
