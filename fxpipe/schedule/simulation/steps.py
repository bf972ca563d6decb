"""Steps one behind the other, with the update of the parameters between them.

A step depends on the one before it only through the times at which its ranks and links are free and its
verdict comes.  So each is simulated by itself, as :func:`.simulator.simulate` does, from where the one before
it ended; on the clock the steps of different ranks overlap.

``"barrier"``: each rank updates when the ops of all ranks are over and their verdicts have arrived.

``"post"``: each rank updates behind its own ops and begins its warm-up of the next step.  Behind that it
waits until it knows that the gradients of all ranks were right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from fxpipe.errors import ScheduleError, number_of
from fxpipe.schedule.check import check_whole
from fxpipe.schedule.costs import Costs, Edge, Update
from fxpipe.schedule.ops import Color, Op, OpKind, Phase, Schedule, Validation
from fxpipe.schedule.simulation.run_loop import RunLoop
from fxpipe.schedule.simulation.simulator import Start, StepRun
from fxpipe.schedule.simulation.timeline import Timeline

_MOST = 64  # steps that are simulated until they repeat
_EQUAL = 1e-9


class Interval(NamedTuple):
    """A time, in the unit of the costs (seconds)."""

    start: float
    end: float


@dataclass(frozen=True)
class Step:
    """One of many steps; its times are on the clock of all of them.

    ``updates``: the optimizer's, on each rank, behind its ops.  ``verdicts``: per rank, from where it could
    start the op behind its warm-up to where the verdict on the step before let it; None where it needs none.
    """

    timeline: Timeline
    updates: tuple[Interval, ...]
    verdicts: tuple[Interval | None, ...]


@dataclass(frozen=True)
class Steps:
    """Consecutive steps.  ``period``: the seconds a step, once the steps repeat."""

    validation: Validation
    steps: tuple[Step, ...] = field(repr=False)
    period: float

    @cached_property
    def longest(self) -> float:
        """The longest time of a rank for its own ops, from the first to the last, and its update: a lower
        bound on the period."""
        last = self.steps[-1]
        spans = zip(last.timeline.spans, last.updates, strict=True)
        return max(row[-1].end - row[0].start + end - start for row, (start, end) in spans if row)

    def last(self, number: int) -> Steps:
        """The last steps alone."""
        return replace(self, steps=self.steps[-number:])

    @property
    def waits(self) -> tuple[float, ...]:
        """The seconds in which each rank waits for the verdict alone, in the last step."""
        return tuple(0.0 if wait is None else wait.end - wait.start for wait in self.steps[-1].verdicts)


def simulate_steps(
    schedule: Schedule, costs: Costs, validation: Validation = "barrier", steps: int = 1
) -> Steps:
    """Simulate so many steps, or more: as many as it takes until they repeat.

    Raises ScheduleError and DeadlockError as ``simulate`` does, and where the costs have the updates of
    another number of ranks.
    """
    check_whole(schedule, costs)
    for name in ("seconds", "copies"):
        number = len(getattr(costs.update, name))
        if number not in (0, schedule.ranks):
            raise ScheduleError(
                f"the costs have the updates of {number_of(number, 'rank')}, and schedule {schedule.name} "
                f"has {schedule.ranks}: give update.{name} one number for each rank"
            )
    lengths = warm_up_lengths(schedule, costs.edges) if validation == "post" else ()
    start: Start | None = None
    records, states, period = list[Step](), list[tuple[float, ...]](), None
    while len(records) < steps or (period is None and len(records) < max(_MOST, steps)):
        run = StepRun(schedule, costs, start)
        timeline = run.finish()
        ready = _ready(timeline, run)
        validated = _together(ready, costs)
        begins, full = (ready, validated) if validation == "post" else (validated, ())
        ends = tuple(begin + costs.update_seconds(rank, validation) for rank, begin in enumerate(begins))
        links = tuple(
            row[-1].end if row else free for row, free in zip(run.carried, run.start.links, strict=True)
        )
        records.append(Step(timeline, tuple(map(Interval, begins, ends)), _verdicts(run)))
        start = Start(ends, links, tuple(zip(lengths, full, strict=True)))
        states.append((*ends, *full, *links))
        period = _repeated(states, schedule.ranks) if period is None else period
    return Steps(validation, tuple(records), _mean(states) if period is None else period)


class SteadyState(NamedTuple):
    """What many steps cost.  ``period``: the seconds of each.  ``updates``, ``messages``: by how much it
    would be shorter if updates with their copies, or messages of verdicts, took no time."""

    period: float
    updates: float
    messages: float


def steady_state(schedule: Schedule, costs: Costs, validation: Validation) -> SteadyState:
    """The state once steps repeat.  Raises as ``simulate_steps`` does."""

    def period(update: Update) -> float:
        return simulate_steps(schedule, replace(costs, update=update), validation).period

    update = costs.update
    now = period(update)
    without = replace(update, seconds=(), copies=()), Update(update.seconds, update.copies)
    shorter = (now - period(other) if other != update else 0.0 for other in without)
    return SteadyState(now, *(max(0.0, part) for part in shorter))


def warm_up_lengths(schedule: Schedule, edges: Iterable[Edge]) -> tuple[int, ...]:
    """The number of ops at the beginning of each rank's order that are its warm-up.

    The warm-ups are the longest for which each op is an F that needs, by ``edges``, values of ops in warm-ups
    alone: then no rank needs anything of a rank that waits for its verdict, and a wrong update costs no more
    than these forwards, which are run again.  In a schedule whose ranks block each other they are the ops
    that could run.
    """
    sources = defaultdict[int, list[Color]](list)
    for edge in edges:
        if edge.target.phase is Phase.F:
            sources[edge.target.stage].append(edge.source)
    lengths, done = [0] * schedule.ranks, set[tuple[Color, int]]()
    loop = RunLoop[tuple[Color, int]](schedule.ranks)

    def missing_for(op: Op) -> tuple[Color, int] | None:
        """What is missing for an op, if anything."""
        values = ((source, op.microbatch) for source in sources[op.stage])
        return next((value for value in values if value not in done), None)

    def advance(rank: int) -> tuple[Color, int] | None:
        for op in schedule.order[rank][lengths[rank] :]:
            if op.kind is not OpKind.F:
                return None
            missing = missing_for(op)
            if missing is not None:
                return missing
            value = Color(op.stage, Phase.F), op.microbatch
            lengths[rank] += 1
            done.add(value)
            loop.happened(value)
        return None

    loop.run(advance)
    return tuple(lengths)


def _ready(timeline: Timeline, run: StepRun) -> tuple[float, ...]:
    """The time at which each rank's gradients are complete, and summed over its replicas."""
    ready = []
    for rank, (ops, exchanges) in enumerate(zip(timeline.spans, timeline.exchanges, strict=True)):
        waiting, until = run.waits[rank]
        ends = [run.start.ranks[rank], *(events[-1].end for events in (ops, exchanges) if events)]
        # A rank whose ops are all warm-up waits before its update.
        ready.append(max(ends + [until] * (waiting == len(ops))))
    return tuple(ready)


def _together(ready: Sequence[float], costs: Costs) -> tuple[float, ...]:
    """The time at which each rank knows that the gradients of all ranks are right."""
    return tuple(
        max(end + costs.verdict_seconds(other, rank) for other, end in enumerate(ready))
        for rank in range(len(ready))
    )


def _verdicts(run: StepRun) -> tuple[Interval | None, ...]:
    waits = zip(run.arrived, run.waits, strict=True)
    return tuple(None if came is None else Interval(came, max(came, until)) for came, (_, until) in waits)


def _repeated(states: Sequence[tuple[float, ...]], ranks: int) -> float | None:
    """The seconds a step if all times of the last state are later than in one before it by the same.

    Then they are so forever: each time is the latest of some times of the step before it, plus constants.
    """
    for back in range(1, min(len(states), ranks + 1)):
        later = [now - then for now, then in zip(states[-1], states[-1 - back], strict=True)]
        if max(later) - min(later) <= _EQUAL * max(states[-1]):
            return max(later) / back
    return None


def _mean(states: Sequence[tuple[float, ...]]) -> float:
    """The seconds a step of the later half."""
    half = len(states) // 2
    return max(now - then for now, then in zip(states[-1], states[half - 1], strict=True)) / (
        len(states) - half
    )
