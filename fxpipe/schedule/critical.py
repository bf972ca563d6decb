"""Why a step takes as long as it does: the chain of ops that nothing but its own members delays."""

from __future__ import annotations

from fxpipe.schedule.dependencies import needs, sections
from fxpipe.schedule.timeline import Span, Timeline


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """From an op that starts first to the op that ends last; each starts because the one before it ended
    (on its rank, or elsewhere and its value arrived then)."""
    schedule = timeline.schedule
    table, own = needs(timeline.costs, schedule.placement), sections(schedule.stages)
    place: dict[int, tuple[int, int]] = {}  # value -> rank, position
    for rank, spans in enumerate(timeline.spans):
        for position, span in enumerate(spans):
            for section in own[span.op.kind][span.op.stage]:
                place[section * schedule.microbatches + span.op.microbatch] = rank, position

    rank = max(range(schedule.ranks), key=lambda r: timeline.spans[r][-1].end if timeline.spans[r] else 0.0)
    at: tuple[int, int] | None = rank, len(timeline.spans[rank]) - 1
    path: list[Span] = []
    while at is not None:
        rank, position = at
        span = timeline.spans[rank][position]
        path.append(span)
        # When each of what it waited for let it start, and where that ran.
        causes = [(timeline.spans[rank][position - 1].end, (rank, position - 1))] if position else []
        for section, delay in table[span.op.kind][span.op.stage]:
            source = place[section * schedule.microbatches + span.op.microbatch]
            causes.append((timeline.spans[source[0]][source[1]].end + delay, source))
        at = max(causes)[1] if causes else None
    return tuple(reversed(path))
