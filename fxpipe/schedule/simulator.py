"""Runs a schedule on costs: every op starts as soon as its rank is free and its values have arrived.

A transfer is a delay: as in the model of 2401.10241, a link carries any number of them at a time.
"""

from __future__ import annotations

from collections import defaultdict

from fxpipe.errors import DeadlockError
from fxpipe.schedule.check import check
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.dependencies import SECTIONS_PER_STAGE, durations, needs, op_of_value, sections
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.timeline import Span, Timeline


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The start and end of every op.  Linear in the number of ops, in time and in memory.

    Raises ScheduleError where the schedule is not whole (see :func:`fxpipe.schedule.check.check`), and
    DeadlockError, listing what each rank waits for, where the ranks' orders cannot progress together.
    """
    check(schedule)
    return Timeline(schedule, costs, _Run(schedule, costs).finish())


class _Run:
    """The state of one simulation."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.needs = needs(costs, schedule.placement)
        self.durations = durations(costs)
        self.sections = sections(schedule.stages)
        values = SECTIONS_PER_STAGE * schedule.stages * schedule.microbatches
        self.ended: list[float | None] = [None] * values
        self.spans: list[list[Span]] = [[] for _ in schedule.order]
        self.waiting: defaultdict[int, list[int]] = defaultdict(list)  # value -> ranks

    def finish(self) -> tuple[tuple[Span, ...], ...]:
        runnable = list(range(self.schedule.ranks))
        while runnable:
            self._advance(runnable.pop(), runnable)
        if self.waiting:
            raise DeadlockError(self._blockage())
        return tuple(tuple(spans) for spans in self.spans)

    def _advance(self, rank: int, runnable: list[int]) -> None:
        """Runs a rank until a value is not there yet; adds the ranks that it wakes to ``runnable``."""
        spans, ended, waiting = self.spans[rank], self.ended, self.waiting
        microbatches, order = self.schedule.microbatches, self.schedule.order[rank]
        free = spans[-1].end if spans else 0.0
        for position in range(len(spans), len(order)):
            op = order[position]
            start = free
            for section, delay in self.needs[op.kind][op.stage]:
                value = section * microbatches + op.microbatch
                end = ended[value]
                if end is None:
                    waiting[value].append(rank)
                    return
                if end + delay > start:
                    start = end + delay
            free = start + self.durations[op.kind][op.stage]
            spans.append(Span(op, start, free))
            for section in self.sections[op.kind][op.stage]:
                value = section * microbatches + op.microbatch
                ended[value] = free
                if value in waiting:
                    runnable.extend(waiting.pop(value))

    def _blockage(self) -> str:
        waits = {rank: value for value, ranks in self.waiting.items() for rank in ranks}
        lines = [f"schedule {self.schedule.name} cannot progress:"]
        for rank, value in sorted(waits.items()):
            op = self.schedule.order[rank][len(self.spans[rank])]
            source = op_of_value(value, self.schedule.microbatches)
            home = self.schedule.placement[source.stage]
            lines.append(f"  rank {rank}, at {op}, waits for {source} of rank {home}")
        return "\n".join(lines)
