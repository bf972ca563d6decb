"""The critical path of a simulated step: a chain of ops, each started by the end of the op before it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from fxpipe.schedule.dependencies import SECTIONS_PER_STAGE, needs, sections

if TYPE_CHECKING:
    from fxpipe.schedule.simulation.timeline import Span, Timeline


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """From an op that starts first to the op that ends last; each starts because the one before it ended
    (on its rank, or elsewhere and its value arrived then)."""
    schedule = timeline.schedule
    table, sections_of = needs(timeline.costs, schedule.placement), sections(schedule.stages)
    microbatches = schedule.microbatches
    position_of = array("q", bytes(8 * SECTIONS_PER_STAGE * schedule.stages * microbatches))  # of a value
    for spans in timeline.spans:
        for position, (op, _, _) in enumerate(spans):
            for section in sections_of[op.kind][op.stage]:
                position_of[section * microbatches + op.microbatch] = position

    rank = max(range(schedule.ranks), key=lambda r: timeline.spans[r][-1].end if timeline.spans[r] else 0.0)
    at: tuple[int, int] | None = rank, len(timeline.spans[rank]) - 1
    path: list[Span] = []
    while at is not None:
        rank, position = at
        span = timeline.spans[rank][position]
        path.append(span)
        # For each dependency: the time at which it let the op start, and the position where it ran.
        causes = [(timeline.spans[rank][position - 1].end, (rank, position - 1))] if position else []
        for section, delay in table[span.op.kind][span.op.stage]:
            holder = schedule.placement[section // SECTIONS_PER_STAGE]
            source = position_of[section * microbatches + span.op.microbatch]
            causes.append((timeline.spans[holder][source].end + delay, (holder, source)))
        at = max(causes)[1] if causes else None
    return tuple(reversed(path))
