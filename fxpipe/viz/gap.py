"""A sentence on the distance of a schedule from the bounds on all schedules: what a longer search or more
memory can gain at most."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from fxpipe.schedule.bound_of_each import lower_bound_of_each
from fxpipe.schedule.memory_bound import lower_bound_within
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.schedule.units import Units

#: Gains below this share of the time are none.
LEAST = 5e-4


def bound_within(timeline: Timeline, limits: Sequence[float] | None) -> float:
    """The bound under limits of activations, of each rank; without any, under the schedule's own peaks."""
    schedule = timeline.schedule
    largest = [max(timeline.peak_memory)] * schedule.ranks if limits is None else limits
    if timeline.of_each:
        return lower_bound_of_each(timeline.of_each, schedule.placement, largest)
    bound = lower_bound_within(timeline.costs, schedule.placement, schedule.microbatches, largest)
    return timeline.lower_bound if bound == inf else bound  # by rounding alone: the schedule keeps its limits


def gap_texts(timeline: Timeline, limits: Sequence[float] | None, units: Units) -> tuple[str, str]:
    """``time 57, lower bound 54 within the memory limit, 51 with any``, and the gains that this leaves."""
    free, within = timeline.lower_bound, bound_within(timeline, limits)
    memory = "its own peak memory" if limits is None else "the memory limit"
    text = f"time {units.time(timeline.seconds)}, lower bound {units.time(within)}"
    text += f" within {memory}"
    if within > free * (1 + LEAST):
        text += f", {units.time(free)} with any"
    search, more = (1 - bound / timeline.seconds for bound in (within, free))
    if more < LEAST:
        return text, "no schedule of these stages is faster"
    if search < LEAST:
        return text, f"only more memory can gain, at most {more:.1%}"
    if more < search + LEAST:
        return text, f"a longer search or more memory can gain at most {search:.1%}"
    return text, f"a longer search can gain at most {search:.1%}, more memory at most {more:.1%}"
