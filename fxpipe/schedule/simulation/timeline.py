"""The result of a simulated step: times, bubbles, memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.bound_of_each import lower_bound_of_each
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.dependencies import SECTIONS_PER_STAGE, Needs, needs, sections
from fxpipe.schedule.ops import Direction, Op, OpKind, Schedule, Transfer
from fxpipe.schedule.simulation.memory import memory_changes, rank_over
from fxpipe.schedule.simulation.transfers import offload_bytes

_Of = TypeVar("_Of")
_Changes = Mapping[OpKind, Sequence[tuple[float, float]]]
"""Per kind and stage of an op, the change of live memory at its start and at its end."""


class Span(NamedTuple):
    """The time in which an op ran, in the unit of the costs (seconds)."""

    op: Op
    start: float
    end: float


class TransferSpan(NamedTuple):
    """The time in which a transfer occupied its link."""

    transfer: Transfer
    start: float
    end: float


class ExchangeSpan(NamedTuple):
    """The time in which the replicas of a rank exchanged what they have of a stage, or its lanes what a
    section of the stage gave."""

    what: str  # "sum" or "gather"; "lanes"
    stage: int
    start: float
    end: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """``spans[rank]`` are the ops that the rank ran, in order.  Times and bytes have the units of ``costs``.

    ``of_each``: the costs of each microbatch, where they differ; then ``costs`` are those of the example.
    ``transfers``: the offloads and reloads of each rank.  ``stalled``: per rank the seconds in which its next
    op waited for a transfer alone.  ``exchanges``: with the other replicas, of each rank; ``lane_exchanges``:
    between its lanes, beside ops.
    """

    schedule: Schedule
    costs: Costs
    spans: tuple[tuple[Span, ...], ...]
    transfers: tuple[tuple[TransferSpan, ...], ...]
    stalled: tuple[float, ...]
    exchanges: tuple[tuple[ExchangeSpan, ...], ...]
    lane_exchanges: tuple[tuple[ExchangeSpan, ...], ...]
    of_each: tuple[Costs, ...] = ()

    def __repr__(self) -> str:
        figures = f"seconds={self.seconds:.6g}, span_bubble={self.span_bubble:.4g}"
        return f"Timeline({self.schedule!r}, {figures}, peak_memory={max(self.peak_memory):.6g} at most)"

    @cached_property
    def begin(self) -> float:
        """The start of the first op or exchange."""
        return min(spans[0].start for spans in self._ran if spans)

    @cached_property
    def seconds(self) -> float:
        """The makespan: from ``begin`` to the last end of an op or an exchange, over all ranks."""
        return max(spans[-1].end for spans in self._ran if spans) - self.begin

    @property
    def _ran(self) -> list[tuple[Span | ExchangeSpan, ...]]:
        """The ops of each rank, and its exchanges."""
        return [*self.spans, *self.exchanges]

    @cached_property
    def exposed_exchange(self) -> float:
        """Seconds of the makespan in which all ops are over and replicas still exchange."""
        ops = max(rank_spans[-1].end for rank_spans in self.spans if rank_spans)
        return max(
            0.0, max((rank_spans[-1].end for rank_spans in self.exchanges if rank_spans), default=0.0) - ops
        )

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Seconds of the makespan in which each rank computes nothing."""
        return tuple(max(0.0, self.seconds - busy) for busy in self.busy)

    @cached_property
    def exposed_communication(self) -> tuple[float, ...]:
        """The idle seconds of each rank in which all inputs of its next op are computed, and some in transit.

        Faster links would save this time directly.
        """
        schedule = self.schedule
        tables, sections_of = self._needs, sections(schedule.stages)
        microbatches = schedule.microbatches
        ended = array("d", bytes(8 * SECTIONS_PER_STAGE * schedule.stages * microbatches))
        for spans in self.spans:
            for op, _, end in spans:
                for section in sections_of[op.kind][op.stage]:
                    ended[section * microbatches + op.microbatch] = end
        step_start = min((spans[0].start for spans in self.spans if spans), default=0.0)
        exposed = []
        for spans in self.spans:
            total, free = 0.0, step_start
            for op, start, end in spans:
                for section, _ in tables[op.microbatch][op.kind][op.stage]:
                    free = max(free, ended[section * microbatches + op.microbatch])
                total += max(0.0, start - free)
                free = end
            exposed.append(total)
        return tuple(exposed)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The ops from one that starts first to the one that ends last; each starts because the one before it
        ended (on its rank, or elsewhere and its value arrived then)."""
        schedule = self.schedule
        tables, sections_of = self._needs, sections(schedule.stages)
        microbatches = schedule.microbatches
        position_of = array("q", bytes(8 * SECTIONS_PER_STAGE * schedule.stages * microbatches))  # of a value
        for spans in self.spans:
            for position, (op, _, _) in enumerate(spans):
                for section in sections_of[op.kind][op.stage]:
                    position_of[section * microbatches + op.microbatch] = position

        rank = max(range(schedule.ranks), key=lambda r: self.spans[r][-1].end if self.spans[r] else 0.0)
        at: tuple[int, int] | None = rank, len(self.spans[rank]) - 1
        path: list[Span] = []
        while at is not None:
            rank, position = at
            span = self.spans[rank][position]
            path.append(span)
            # For each dependency: the time at which it let the op start, and the position where it ran.
            causes = [(self.spans[rank][position - 1].end, (rank, position - 1))] if position else []
            for section, delay in tables[span.op.microbatch][span.op.kind][span.op.stage]:
                holder = schedule.placement[section // SECTIONS_PER_STAGE]
                source = position_of[section * microbatches + span.op.microbatch]
                causes.append((self.spans[holder][source].end + delay, (holder, source)))
            at = max(causes)[1] if causes else None
        return tuple(reversed(path))

    @cached_property
    def span(self) -> float:
        """The longest of the ranks' times from their first op's start to their last op's end."""
        return max(spans[-1].end - spans[0].start for spans in self.spans if spans)

    @cached_property
    def span_bubble(self) -> float:
        """The rate of 2401.10241: (span - work) / span.

        The work is that of the busiest rank, which for even costs is the paper's m·(F+B+W).
        """
        return _bubble(self.span, max(self.busy))

    @cached_property
    def makespan_bubble(self) -> float:
        """The idle share of the ranks in the makespan, instead of in the span."""
        return _bubble(self.seconds, max(self.busy))

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """The changes of each rank's live memory: (time, bytes live from that time on).

        A value that one stage hands to another stage of its rank is live from the producer's end to the
        consumer's start.  An offloaded activation is freed between two ops, and is live again from the start
        of its reload.
        """
        return tuple(
            _memory(spans, self.change_of, self._between(rank)) for rank, spans in enumerate(self.spans)
        )

    def change_of(self, op: Op) -> tuple[float, float]:
        """The change of live memory at the start of an op, and at its end."""
        return self._changes[op.microbatch][op.kind][op.stage]

    def costs_of(self, microbatch: int) -> Costs:
        return self.of_each[microbatch] if self.of_each else self.costs

    @cached_property
    def _each(self) -> Sequence[Costs]:
        return self.of_each or (self.costs,) * self.schedule.microbatches

    @cached_property
    def _needs(self) -> Sequence[Mapping[OpKind, tuple[Needs, ...]]]:
        return for_each(self._each, lambda costs: needs(costs, self.schedule.placement))

    @cached_property
    def _changes(self) -> Sequence[_Changes]:
        placement, run = self.schedule.placement, sections(self.schedule.stages)

        def changes(costs: Costs) -> _Changes:
            at_start, at_end = memory_changes(costs, placement)
            return {
                kind: [
                    (sum(at_start[s] for s in joined), sum(at_end[s] for s in joined)) for joined in per_stage
                ]
                for kind, per_stage in run.items()
            }

        return for_each(self._each, changes)

    def _between(self, rank: int) -> list[list[tuple[float, float]]]:
        """The (time, change) of live memory after each op: by the offloads that are waited for there, and
        then by the reloads that start there."""
        # When all offloads that are waited for after an op have ended.
        waited = [span.end for span in self.spans[rank]]
        freed, reloaded = ([list[float]() for _ in waited] for _ in range(2))
        for transfer, _, end in self.transfers[rank]:
            size = offload_bytes(self.costs_of(transfer.microbatch).stages[transfer.stage], transfer.user)
            if transfer.direction is Direction.OUT:
                waited[transfer.end - 1] = max(waited[transfer.end - 1], end)
                freed[transfer.end - 1].append(-size)
            else:
                reloaded[transfer.begin - 1].append(size)
        return [
            [(time, change) for change in (*less, *more)]
            for time, less, more in zip(waited, freed, reloaded, strict=True)
        ]

    @cached_property
    def moved(self) -> float:
        """Memory offloaded in a step, in the unit of the costs."""
        return sum(
            offload_bytes(self.costs_of(t.microbatch).stages[t.stage], t.user)
            for t in self.schedule.transfers
            if t.direction is Direction.OUT
        )

    @cached_property
    def link_busy(self) -> tuple[tuple[float, float], ...]:
        """The seconds of each rank's offloads, and of its reloads."""
        return tuple(
            (
                sum(end - start for t, start, end in rank_spans if t.direction is Direction.OUT),
                sum(end - start for t, start, end in rank_spans if t.direction is Direction.IN),
            )
            for rank_spans in self.transfers
        )

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """The maximum live memory of each rank."""
        return tuple(max((live for _, live in steps), default=0.0) for steps in self.memory)

    def fits(self, limits: Sequence[float]) -> bool:
        """Whether all ranks are within their limits, up to rounding."""
        return rank_over(self.peak_memory, limits) is None

    @cached_property
    def lower_bound(self) -> float:
        """A lower bound on the seconds of any schedule of this placement: :mod:`fxpipe.schedule.bound`."""
        placement = self.schedule.placement
        if self.of_each:
            return lower_bound_of_each(self.of_each, placement)
        return lower_bound(self.costs, placement, self.schedule.microbatches)


def for_each(each: Sequence[Costs], of: Callable[[Costs], _Of]) -> list[_Of]:
    """What follows from the costs of each microbatch, made once for those that share one object."""
    known = {id(costs): costs for costs in each}
    made = {key: of(costs) for key, costs in known.items()}
    return [made[id(costs)] for costs in each]


def _bubble(whole: float, work: float) -> float:
    # The largest rank's own sum of times can exceed its span by rounding.
    return max(0.0, (whole - work) / whole) if whole > 0 else 0.0


def _memory(
    spans: tuple[Span, ...],
    change_of: Callable[[Op], tuple[float, float]],
    between: list[list[tuple[float, float]]],
) -> tuple[tuple[float, float], ...]:
    """The changes of a rank's memory.  ``between``: further changes after each op, before the next one
    starts."""
    live, steps = 0.0, []
    for (op, start, end), further in zip(spans, between, strict=True):
        at_start, at_end = change_of(op)
        for time, change in ((start, at_start), (end, at_end), *further):
            if change:
                live += change
                steps.append((time, live))
    return tuple(steps)
