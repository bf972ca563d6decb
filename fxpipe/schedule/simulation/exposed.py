"""Exposed communication: not overlapped with computation."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from fxpipe.schedule.dependencies import SECTIONS_PER_STAGE, needs, sections

if TYPE_CHECKING:
    from fxpipe.schedule.simulation.timeline import Timeline


def exposed_communication(timeline: Timeline) -> tuple[float, ...]:
    """Per rank the idle seconds in which all inputs of its next op are computed, and some are in transit.

    Faster links would save this time directly.
    """
    schedule = timeline.schedule
    table, sections_of = needs(timeline.costs, schedule.placement), sections(schedule.stages)
    microbatches = schedule.microbatches
    ended = array("d", bytes(8 * SECTIONS_PER_STAGE * schedule.stages * microbatches))
    for spans in timeline.spans:
        for op, _, end in spans:
            for section in sections_of[op.kind][op.stage]:
                ended[section * microbatches + op.microbatch] = end
    step_start = min((spans[0].start for spans in timeline.spans if spans), default=0.0)
    exposed = []
    for spans in timeline.spans:
        total, free = 0.0, step_start
        for op, start, end in spans:
            for section, _ in table[op.kind][op.stage]:
                free = max(free, ended[section * microbatches + op.microbatch])
            total += max(0.0, start - free)
            free = end
        exposed.append(total)
    return tuple(exposed)
