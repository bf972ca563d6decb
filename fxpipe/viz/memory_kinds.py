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
from fxpipe.schedule.offload.transfers import offload_bytes
from fxpipe.schedule.ops import PHASES, Direction, Phase, arrival
from fxpipe.schedule.simulation.timeline import Span, Timeline


class Held(StrEnum):
    """A kind of memory that comes and goes in a step."""

    SAVED = "saved activations"
    FOR_WEIGHT = "kept for W"
    HANDED = "handed to a stage of the rank"
    RECEIVED = "messages received"


class Change(NamedTuple):
    """``bytes`` more (or fewer) of a kind from ``time`` on; ``stage``: whose values they are."""

    time: float
    held: Held
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
    """Per rank."""
    return tuple(
        Standing(
            own.parameters,
            own.gradients,
            own.buffers,
            sum(plan.layouts[name].nbytes for name in plan.tensors[rank].constants),
            own.optimizer or adamw_bytes(plan, rank),
            own.results + own.exchange + own.copies,
            plan.pools[rank] if plan.pools else 0,
        )
        for rank, own in enumerate(held_bytes(plan))
    )


_Spans = dict[tuple[int, Phase, int], Span]
"""By stage, phase and microbatch."""


def changes(timeline: Timeline) -> tuple[tuple[Change, ...], ...]:
    """Per rank the changes of its memory, in order of time.

    Without RECEIVED they add up to ``timeline.memory``.
    """
    stages, placement = timeline.costs.stages, timeline.schedule.placement
    found: list[list[Change]] = [[] for _ in timeline.spans]
    spans = {(span.op.stage, phase, span.op.microbatch): span for own in timeline.spans for span in own
             for phase in PHASES[span.op.kind]}  # fmt: skip
    for rank, own in enumerate(timeline.spans):
        for op, start, end in own:
            cost, add = stages[op.stage], found[rank].append
            for phase in PHASES[op.kind]:
                match phase:
                    case Phase.F:
                        add(Change(start, Held.SAVED, op.stage, cost.saved_activations))
                    case Phase.B:
                        add(Change(end, Held.SAVED, op.stage, -cost.saved_activations))
                        add(Change(end, Held.FOR_WEIGHT, op.stage, cost.saved_for_weight))
                    case Phase.W:
                        add(Change(end, Held.FOR_WEIGHT, op.stage, -cost.saved_for_weight))
        _add_transfers(timeline, rank, spans, found[rank])
    _add_values(timeline, spans, placement, found)
    return tuple(tuple(sorted((c for c in own if c.bytes), key=lambda c: c.time)) for own in found)


def _add_transfers(timeline: Timeline, rank: int, spans: _Spans, found: list[Change]) -> None:
    ends = [span.end for span in timeline.spans[rank]]
    over: defaultdict[int, float] = defaultdict(float)  # by position: when its offloads are waited for
    carried = timeline.transfers[rank] if timeline.transfers else ()
    for transfer, _, end in carried:
        if transfer.direction is Direction.OUT:
            over[transfer.end - 1] = max(over[transfer.end - 1], end, ends[transfer.end - 1])
    times = {
        (t.activation, t.direction): over[t.end - 1]
        if t.direction is Direction.OUT
        else max(over[t.begin - 1], ends[t.begin - 1])
        for t, *_ in carried
    }
    for (activation, direction), time in times.items():
        stage, microbatch, user = activation
        size = offload_bytes(timeline.costs.stages[stage], user)
        b = spans[stage, Phase.B, microbatch].end
        held = Held.SAVED if user is Phase.B or time < b else Held.FOR_WEIGHT
        found.append(Change(time, held, stage, -size if direction is Direction.OUT else size))
        if direction is Direction.OUT and user is Phase.W and time < b <= times[activation, Direction.IN]:
            found.append(Change(b, Held.SAVED, stage, size))  # what is away belongs to W from here on
            found.append(Change(b, Held.FOR_WEIGHT, stage, -size))


def _add_values(
    timeline: Timeline,
    spans: _Spans,
    placement: tuple[int, ...],
    found: list[list[Change]],
) -> None:
    """Values between stages of one rank, and messages from their arrival to the start of their op."""
    for edge in timeline.costs.edges:
        source, target = edge.source, arrival(edge.target)
        rank, sender = placement[target.stage], placement[source.stage]
        for m in range(timeline.schedule.microbatches):
            given, taken = (
                spans.get((source.stage, source.phase, m)),
                spans.get((target.stage, target.phase, m)),
            )
            if given is None or taken is None or not edge.bytes:
                continue
            if sender == rank:
                until = spans[edge.target.stage, edge.target.phase, m].start
                found[rank].append(Change(given.end, Held.HANDED, source.stage, edge.bytes))
                found[rank].append(Change(until, Held.HANDED, source.stage, -edge.bytes))
            else:
                arrived = given.end + timeline.costs.message_seconds(edge, placement)
                if arrived < taken.start:
                    found[rank].append(Change(arrived, Held.RECEIVED, target.stage, edge.bytes))
                    found[rank].append(Change(taken.start, Held.RECEIVED, target.stage, -edge.bytes))
