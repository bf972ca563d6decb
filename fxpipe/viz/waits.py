"""The cause of each op's begin in a step, and what its rank waited for while it was idle.

    rank 5:  … F5.2 |  idle: waits for B6.0 of rank 6  | B5.0 …

The rules are those of the simulator: an op begins when the op before it is over, its values have arrived, and
what it needs of transfers and of other replicas is there.  The last of these is the *cause*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum
from math import inf
from typing import NamedTuple

from fxpipe.schedule.dependencies import Needs, index, needs, sections
from fxpipe.schedule.ops import PHASES, Color, Op, OpKind, Transfer
from fxpipe.schedule.simulation.memory import memory_changes
from fxpipe.schedule.simulation.timeline import Span, Timeline


class Cause(StrEnum):
    """What let an op begin."""

    RANK = "rank"  # the op before it on its rank was over, or the step began
    MESSAGE = "message"  # a value of another rank arrived
    TRANSFER = "transfer"  # an offload or a reload was over
    EXCHANGE = "exchange"  # parameters of the stage came from the other replicas


class IdleWait(NamedTuple):
    """The cause of one op's begin.

    ``rank``, ``position``: of the op that gave the value (of MESSAGE), else the op's own rank and -1.
    ``made``: when that op was over; what is left until ``over`` the message was on its way.  ``over``: when
    the cause let the op begin.  ``transfer``: of TRANSFER.
    """

    cause: Cause
    rank: int
    position: int
    made: float
    over: float
    transfer: Transfer | None = None


class Passed(NamedTuple):
    """An op that could have begun in an idle gap and stands later in the order of its rank.

    ``position``: of that op.  ``ready``: since when.  ``live``: the memory that the rank would then hold at
    the beginning of the gap, in the unit of the costs; if it is above the rank's peak, memory is the reason
    for the order.
    """

    position: int
    ready: float
    live: float


def waits(timeline: Timeline) -> tuple[tuple[IdleWait, ...], ...]:
    """Per rank and op of a simulated step the cause of its begin."""
    return _waits(timeline, timeline.spans, with_delays=True)


def measured_waits(timeline: Timeline, spans: Sequence[Sequence[Span]]) -> tuple[tuple[IdleWait, ...], ...]:
    """The waits of a measured step with the ops of ``timeline`` and aligned clocks.

    A message's time on its way is unknown there: it counts as arrived when the op that gave it was over.
    Transfers and exchanges are not recorded, so that gaps of theirs have the cause RANK.
    """
    return _waits(timeline, spans, with_delays=False)


def _waits(
    timeline: Timeline, all_spans: Sequence[Sequence[Span]], with_delays: bool
) -> tuple[tuple[IdleWait, ...], ...]:
    schedule = timeline.schedule
    table = needs(timeline.costs, schedule.placement)
    origins = runs(all_spans)
    beginning = timeline.begin if with_delays else min(spans[0].start for spans in all_spans if spans)
    by_rank: list[tuple[IdleWait, ...]] = []
    for rank, spans in enumerate(all_spans):
        due: defaultdict[int, list[tuple[float, Transfer]]] = defaultdict(list)
        for carried in timeline.transfers[rank] if with_delays else ():
            due[carried.transfer.end].append((carried.end, carried.transfer))
        rank_waits, free = [], beginning
        for position, (op, start, end) in enumerate(spans):
            # Until something else proves to be later, the op begins when the one before it is over.
            wait = IdleWait(Cause.RANK, rank, position - 1, free, free)
            for section, delay in table[op.kind][op.stage]:
                home, at, giver = origins[section, op.microbatch]
                arrived = giver.end + delay * with_delays
                # Of another rank, or exchanged between lanes: else it was over before.
                if arrived > wait.over:
                    wait = IdleWait(Cause.MESSAGE, home, at, giver.end, arrived)
            for over, transfer in due.get(position, ()):
                if over > wait.over:
                    wait = IdleWait(Cause.TRANSFER, rank, -1, over, over, transfer)
            # Nothing else makes an op of the simulator wait.
            if with_delays and start > wait.over + _EPSILON * timeline.seconds:
                if wait.cause is Cause.MESSAGE and wait.rank == rank:  # behind other exchanges of the lanes
                    wait = wait._replace(over=start)
                else:
                    wait = IdleWait(Cause.EXCHANGE, rank, -1, start, start)
            rank_waits.append(wait)
            free = end
        by_rank.append(tuple(rank_waits))
    return tuple(by_rank)


#: Of a step: a gap below this share of it is rounding.
_EPSILON = 1e-9


def passed(timeline: Timeline) -> tuple[dict[int, Passed], ...]:
    """Per rank, by the position of an op behind an idle gap: the op that could have filled the gap.

    Of several it is the one that was ready first.  Candidates are the next ops of each stage and kind.
    """
    schedule = timeline.schedule
    table = needs(timeline.costs, schedule.placement)
    origins = runs(timeline.spans)
    at_start, _ = memory_changes(timeline.costs, schedule.placement)
    own_sections = sections(schedule.stages)
    by_rank: list[dict[int, Passed]] = []
    for rank, spans in enumerate(timeline.spans):
        levels = timeline.memory[rank]
        left: defaultdict[tuple[OpKind, int], list[int]] = defaultdict(list)  # positions, the last one first
        for position in reversed(range(len(spans))):
            left[spans[position].op.kind, spans[position].op.stage].append(position)
        rank_passed: dict[int, Passed] = {}
        level, live, free = 0, 0.0, timeline.begin
        for position, (op, start, end) in enumerate(spans):
            # What is left of each kind and stage stands behind this op.
            left[op.kind, op.stage].pop()
            # The memory at the beginning of the gap.
            while level < len(levels) and levels[level][0] <= free:
                live, level = levels[level][1], level + 1
            if start > free + _EPSILON * timeline.seconds:
                heads = [positions[-1] for positions in left.values() if positions]
                ready = min(((_ready(spans[p].op, table, origins), p) for p in heads), default=(inf, -1))
                # Else nothing was ready before the op that ran.
                if ready[0] < start:
                    other = spans[ready[1]].op
                    more = sum(at_start[s] for s in own_sections[other.kind][other.stage])
                    rank_passed[position] = Passed(ready[1], ready[0], live + more)
            free = end
        by_rank.append(rank_passed)
    return tuple(by_rank)


Runs = dict[tuple[int, int], tuple[int, int, Span]]
"""(section, microbatch) -> rank, position and span of the op that runs it."""


def runs(all_spans: Sequence[Sequence[Span]]) -> Runs:
    """The place and time at which each value was computed, by the spans of each rank."""
    return {
        (index(Color(span.op.stage, phase)), span.op.microbatch): (rank, position, span)
        for rank, spans in enumerate(all_spans)
        for position, span in enumerate(spans)
        for phase in PHASES[span.op.kind]
    }


def _ready(op: Op, table: dict[OpKind, tuple[Needs, ...]], origins: Runs) -> float:
    """The time at which all values of an op are there."""
    ready = 0.0
    for section, delay in table[op.kind][op.stage]:
        *_, giver = origins[section, op.microbatch]
        ready = max(ready, giver.end + delay)
    return ready
