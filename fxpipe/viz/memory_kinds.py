"""What a rank's memory holds at each moment of a simulated step, by kind.

    weights, gradients, buffers, constants, optimizer, other     the whole step
    saved        activations of a stage, from the start of F to the end of B
    for weight   what W needs of them, and the gradients that B leaves it, to the end of W
    handed over  values for another stage of the same rank, until it takes them
    received     messages that have arrived and wait for their op (beside the simulated memory)

Offloaded activations leave ``saved`` or ``for weight`` while they are away.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from fxpipe.plan.artifact import Plan
from fxpipe.plan.memory import adamw_bytes, held_bytes
from fxpipe.schedule.dependencies import index
from fxpipe.schedule.ops import PHASES, Color, Direction, Phase, arrival
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.schedule.simulation.transfers import offload_bytes
from fxpipe.viz.waits import Runs, runs


class MemoryKind(StrEnum):
    """A kind of memory that comes and goes in a step."""

    SAVED = "saved activations"
    FOR_WEIGHT = "kept for W"
    HANDED = "handed to a stage of the rank"
    RECEIVED = "messages received"


class MemoryChange(NamedTuple):
    """``bytes`` more (or fewer) of a kind from ``time`` on; ``stage``: whose values they are."""

    time: float
    kind: MemoryKind
    stage: int
    bytes: float


@dataclass(frozen=True)
class Standing:
    """Bytes that a rank holds during the whole step.  ``optimizer``: its state, taken for AdamW's if the plan
    does not say.  ``other``: results, the memory of sums over replicas, copies.  ``pool``: of the offload
    store, beside the device."""

    weights: int
    gradients: int
    buffers: int
    constants: int
    optimizer: int
    other: int
    pool: int


def standing(plan: Plan) -> tuple[Standing, ...]:
    """What each rank holds during the whole step."""
    return tuple(
        Standing(
            size.parameters,
            size.gradients,
            size.buffers,
            sum(plan.layouts[name].nbytes for name in plan.tensors[rank].constants),
            size.optimizer or adamw_bytes(plan, rank),
            size.results + size.exchange + size.copies,
            plan.pools[rank] if plan.pools else 0,
        )
        for rank, size in enumerate(held_bytes(plan))
    )


def changes(timeline: Timeline) -> tuple[tuple[MemoryChange, ...], ...]:
    """Per rank the changes of its memory, in order of time.

    Without RECEIVED they add up to ``timeline.memory``.
    """
    by_rank: list[list[MemoryChange]] = [[] for _ in timeline.spans]
    ran = runs(timeline.spans)
    # An op's memory begins or ends with it, as in ``Timeline.memory``.
    for rank, row in enumerate(timeline.spans):
        for op, start, end in row:
            cost, add = timeline.costs_of(op.microbatch).stages[op.stage], by_rank[rank].append
            for phase in PHASES[op.kind]:
                match phase:
                    case Phase.F:
                        add(MemoryChange(start, MemoryKind.SAVED, op.stage, cost.saved_activations))
                    case Phase.B:
                        add(MemoryChange(end, MemoryKind.SAVED, op.stage, -cost.saved_activations))
                        add(MemoryChange(end, MemoryKind.FOR_WEIGHT, op.stage, cost.saved_for_weight))
                    case Phase.W:
                        add(MemoryChange(end, MemoryKind.FOR_WEIGHT, op.stage, -cost.saved_for_weight))
        _add_transfers(timeline, rank, ran, by_rank[rank])
    _add_values(timeline, ran, by_rank)
    return tuple(tuple(sorted((c for c in row if c.bytes), key=lambda c: c.time)) for row in by_rank)


def _add_transfers(timeline: Timeline, rank: int, ran: Runs, rank_changes: list[MemoryChange]) -> None:
    ends = [span.end for span in timeline.spans[rank]]
    over: defaultdict[int, float] = defaultdict(float)  # by position: when its offloads are waited for
    carried = timeline.transfers[rank]
    for transfer, _, end in carried:
        if transfer.direction is Direction.OUT:
            # The memory is free when the rank has waited for the offload, not when that is over.
            over[transfer.end - 1] = max(over[transfer.end - 1], end, ends[transfer.end - 1])
    times = {
        (t.activation, t.direction): over[t.end - 1]
        if t.direction is Direction.OUT
        else max(over[t.begin - 1], ends[t.begin - 1])
        for t, *_ in carried
    }
    for (activation, direction), time in times.items():
        stage, microbatch, user = activation
        size = offload_bytes(timeline.costs_of(microbatch).stages[stage], user)
        b = ran[index(Color(stage, Phase.B)), microbatch][2].end
        kind = MemoryKind.SAVED if user is Phase.B or time < b else MemoryKind.FOR_WEIGHT
        rank_changes.append(MemoryChange(time, kind, stage, -size if direction is Direction.OUT else size))
        if direction is Direction.OUT and user is Phase.W and time < b <= times[activation, Direction.IN]:
            # From the end of B on, offloaded memory belongs to W.
            rank_changes.append(MemoryChange(b, MemoryKind.SAVED, stage, size))
            rank_changes.append(MemoryChange(b, MemoryKind.FOR_WEIGHT, stage, -size))


def _add_values(timeline: Timeline, ran: Runs, by_rank: list[list[MemoryChange]]) -> None:
    """Values between stages of one rank, and messages from their arrival to the start of their op."""
    placement = timeline.schedule.placement
    for m in range(timeline.schedule.microbatches):
        costs = timeline.costs_of(m)
        for edge in costs.edges:
            sender, _, giver = ran[index(edge.source), m]
            rank, _, taker = ran[index(arrival(edge.target)), m]
            # Nothing is sent, so the value is in memory from when it is made.
            if sender == rank:
                kind, stage = MemoryKind.HANDED, edge.source.stage
                since, until = giver.end, ran[index(edge.target), m][2].start
            else:
                kind, stage = MemoryKind.RECEIVED, edge.target.stage
                since, until = giver.end + costs.message_seconds(edge, placement), taker.start
            # Of no time, it would only make a notch.
            if since < until:
                by_rank[rank] += (
                    MemoryChange(since, kind, stage, edge.bytes),
                    MemoryChange(until, kind, stage, -edge.bytes),
                )
