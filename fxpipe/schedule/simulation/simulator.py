"""Runs a schedule on costs: every op starts as soon as its rank is free and its values have arrived.

A message is a delay: as in the model of 2401.10241, the channel between two ranks carries any number of
messages at a time.  The link for offloaded activations carries one transfer at a time in each direction, and
that to the other replicas of a rank one exchange; so does that between its lanes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.errors import DeadlockError
from fxpipe.schedule.bucket_use import Asks, BucketUse, once, per_use
from fxpipe.schedule.check import check_whole
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.dependencies import (
    SECTIONS_PER_STAGE,
    between_lanes,
    durations,
    needs,
    op_of_value,
    sections,
)
from fxpipe.schedule.ops import PHASES, Direction, Op, OpKind, Phase, Schedule, Transfer
from fxpipe.schedule.simulation.run_loop import RunLoop
from fxpipe.schedule.simulation.timeline import ExchangeSpan, Span, Timeline, TransferSpan, for_each
from fxpipe.schedule.simulation.transfers import link_queues, offload_bytes


@dataclass(frozen=True)
class Start:
    """What a step begins with: per rank the time from which on it can run, and per queue of a link the time
    from which on that is free.

    ``waits``: per rank the position of an op and a time before which that does not start; empty for none.
    """

    ranks: tuple[float, ...]
    links: tuple[float, ...]
    waits: tuple[tuple[int, float], ...] = ()


def simulate(schedule: Schedule, costs: Costs, of_each: Sequence[Costs] = ()) -> Timeline:
    """The start and end of every op and transfer.  Linear in the number of both, in time and in memory.

    of_each: see ``Timeline``.

    Raises ScheduleError if the schedule is not complete (see :func:`fxpipe.schedule.check.check`), and
    DeadlockError, listing what each rank waits for, if the orders of the ranks block each other.
    """
    check_whole(schedule, costs)
    return StepRun(schedule, costs, of_each=of_each).finish()


class StepRun:
    """One step: the run loop over actors, first the ranks, then the link queues.

    A value is the result of a section for one microbatch; transfers are numbered after the values.
    ``start``: None if all begins at 0.  ``arrived``: per rank when it could start the op of ``start.waits``.
    ``needs``, ``durations``: of each microbatch.
    """

    def __init__(
        self, schedule: Schedule, costs: Costs, start: Start | None = None, of_each: Sequence[Costs] = ()
    ) -> None:
        self.schedule, self.costs, self.of_each = schedule, costs, tuple(of_each)
        self.of_microbatch = self.of_each or (costs,) * schedule.microbatches
        self.needs = for_each(self.of_microbatch, lambda one: needs(one, schedule.placement))
        self.durations = for_each(self.of_microbatch, durations)
        self.sections = sections(schedule.stages)
        self.values = SECTIONS_PER_STAGE * schedule.stages * schedule.microbatches
        self.ended: list[float | None] = [None] * (self.values + len(schedule.transfers))
        self.spans: list[list[Span]] = [[] for _ in schedule.order]
        self.stalled = [0.0] * schedule.ranks
        self.link_queues = link_queues(schedule, costs)
        self.start = start or Start((0.0,) * schedule.ranks, (0.0,) * len(self.link_queues))
        self.waits = self.start.waits or ((-1, 0.0),) * schedule.ranks
        self.arrived: list[float | None] = [None] * schedule.ranks
        self.exchanges = [
            _Exchanges(ops, costs, begin) for ops, begin in zip(schedule.order, self.start.ranks, strict=True)
        ]
        self.lanes = _LaneLinks(schedule, costs)
        self.loop = RunLoop[int](schedule.ranks + len(self.link_queues))
        self.carried: list[list[TransferSpan]] = [[] for _ in self.link_queues]
        self.freed: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in schedule.order]
        self.due: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in schedule.order]
        for k, transfer in enumerate(schedule.transfers):
            rank = schedule.placement[transfer.stage]
            if transfer.direction is Direction.OUT:
                self.freed[rank][transfer.end].append(self.values + k)
            self.due[rank][transfer.end].append(self.values + k)

    def finish(self) -> Timeline:
        blocked = self.loop.run(self._advance)
        if blocked:
            raise DeadlockError(self._blockage(blocked))
        spans = tuple(tuple(spans) for spans in self.spans)
        carried: list[list[TransferSpan]] = [[] for _ in self.spans]
        for span in (span for queue in self.carried for span in queue):
            carried[self.schedule.placement[span.transfer.stage]].append(span)
        return Timeline(
            self.schedule,
            self.costs,
            spans,
            transfers=tuple(map(tuple, carried)),
            stalled=tuple(self.stalled),
            exchanges=tuple(tuple(exchange.spans) for exchange in self.exchanges),
            lane_exchanges=tuple(map(tuple, self.lanes.spans)),
            of_each=self.of_each,
        )

    def _advance(self, actor: int) -> int | None:
        ranks = self.schedule.ranks
        return self._compute(actor) if actor < ranks else self._carry(actor - ranks)

    def _compute(self, rank: int) -> int | None:
        """Run a rank until it needs a value that is not computed yet."""
        spans, ended, due = self.spans[rank], self.ended, self.due[rank]
        microbatches, order = self.schedule.microbatches, self.schedule.order[rank]
        waiting, until = self.waits[rank]
        free = spans[-1].end if spans else self.start.ranks[rank]
        for position in range(len(spans), len(order)):
            op = order[position]
            start = free
            for section, delay in self.needs[op.microbatch][op.kind][op.stage]:
                value = section * microbatches + op.microbatch
                end = ended[value]
                if end is None:
                    return value
                if delay and value in self.lanes.queued:
                    delay += self.lanes.queued[value]
                if end + delay > start:
                    start = end + delay
            if position in due:
                ready = start
                for value in due[position]:
                    end = ended[value]
                    if end is None:
                        return value
                    start = max(start, end)
                self.stalled[rank] += start - ready
            if position == waiting:
                self.arrived[rank] = start
                start = max(start, until)
            start = self.exchanges[rank].begin(op, start)
            free = start + self.durations[op.microbatch][op.kind][op.stage]
            self.exchanges[rank].end(op, free)
            spans.append(Span(op, start, free))
            for section in self.sections[op.kind][op.stage]:
                self.lanes.exchange(rank, section, op.microbatch, free)
                self._end(section * microbatches + op.microbatch, free)
        return None

    def _carry(self, queue: int) -> int | None:
        """Run one direction of a link until a transfer waits for an op or a transfer that has not ended."""
        carried = self.carried[queue]
        free = carried[-1].end if carried else self.start.links[queue]
        for k in self.link_queues[queue][len(carried) :]:
            transfer, start = self.schedule.transfers[k], free
            for cause in self._causes(transfer):
                end = self.ended[cause]
                if end is None:
                    return cause
                start = max(start, end)
            assert self.costs.link is not None, "it has transfers"
            size = offload_bytes(
                self.of_microbatch[transfer.microbatch].stages[transfer.stage], transfer.user
            )
            free = start + self.costs.link.seconds * size
            carried.append(TransferSpan(transfer, start, free))
            self._end(self.values + k, free)
        return None

    def _causes(self, transfer: Transfer) -> list[int]:
        """The values and transfers that must end before a transfer starts."""
        rank = self.schedule.placement[transfer.stage]
        op = self.schedule.order[rank][transfer.begin - 1]
        behind = self.sections[op.kind][op.stage][-1] * self.schedule.microbatches + op.microbatch
        if transfer.direction is Direction.OUT:
            return [behind]
        # Offloads that are waited for at the same place: the reload may need their memory.
        return [behind, *self.freed[rank].get(transfer.begin, ())]

    def _end(self, value: int, time: float) -> None:
        self.ended[value] = time
        self.loop.happened(value)

    def _blockage(self, blocked: dict[int, int]) -> str:
        lines = [f"schedule {self.schedule.name} cannot progress:"]
        for actor, value in sorted(blocked.items()):
            if actor < self.schedule.ranks:
                op = self.schedule.order[actor][len(self.spans[actor])]
                lines.append(f"  rank {actor}, at {op}, waits for {self._name(value)}")
            else:
                queue = actor - self.schedule.ranks
                transfer = self.schedule.transfers[self.link_queues[queue][len(self.carried[queue])]]
                lines.append(f"  the link, at {transfer}, waits for {self._name(value)}")
        return "\n".join(lines)

    def _name(self, value: int) -> str:
        if value >= self.values:
            return str(self.schedule.transfers[value - self.values])
        source = op_of_value(value, self.schedule.microbatches)
        return f"{source} of rank {self.schedule.placement[source.stage]}"


class _LaneLinks:
    """The links between the lanes of each rank.  ``queued``: the seconds for which what a value's section
    gives to be exchanged waits for exchanges before it.  ``spans``: those so far, of each rank."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.queued: dict[int, float] = {}
        self.spans: list[list[ExchangeSpan]] = [[] for _ in schedule.order]
        self._microbatches = schedule.microbatches
        self._seconds = between_lanes(costs)

    def exchange(self, rank: int, section: int, microbatch: int, end: float) -> None:
        """Exchange what a section that has ended gives to the next one."""
        if section not in self._seconds:
            return
        spans = self.spans[rank]
        start = max(end, spans[-1].end) if spans else end
        if start > end:
            self.queued[section * self._microbatches + microbatch] = start - end
        stage = section // SECTIONS_PER_STAGE
        spans.append(ExchangeSpan("lanes", stage, start, start + self._seconds[section]))


class _Exchanges:
    """The exchanges of a rank with its other replicas, one after the other on their link, as its ops are run
    in their order from time ``begin`` on.  ``spans``: those so far.

    All replicas run the same schedule, so they come to each exchange at the same time.
    """

    def __init__(self, ops: Sequence[Op], costs: Costs, begin: float) -> None:
        self.spans: list[ExchangeSpan] = []
        self._costs = costs.exchanges
        self._ready: dict[Op, float] = {}  # when the parameters are there that it needs first
        self._asks: defaultdict[Op, list[tuple[int, Op]]] = defaultdict(list)  # the stage, and who needs it
        self._sums: defaultdict[Op, list[int]] = defaultdict(list)
        if not costs.exchanges:
            return
        asks = Asks(ops)
        for stage in dict.fromkeys(op.stage for op in ops):
            use = _use(ops, stage, costs.exchanges[stage].per_use)
            for op in use.sums:
                self._sums[op].append(stage)
            for first, _ in use.spans:
                if not use.frees or first == ops[0]:
                    self._gather(stage, first, begin)
            for op, first in asks.of(use) if use.frees else ():
                self._asks[op].append((stage, first))

    def begin(self, op: Op, start: float) -> float:
        """Return when an op begins that could begin at ``start``, and ask for what later ones need."""
        start = max(start, self._ready.get(op, 0.0))
        for stage, first in self._asks.pop(op, ()):
            self._gather(stage, first, start)
        return start

    def end(self, op: Op, end: float) -> None:
        for stage in self._sums.pop(op, ()):
            self._carry("sum", stage, self._costs[stage].sum, end)

    def _gather(self, stage: int, op: Op, time: float) -> None:
        self._ready[op] = self._carry("gather", stage, self._costs[stage].gather, time)

    def _carry(self, what: str, stage: int, seconds: float, time: float) -> float:
        """Exchange from ``time`` on; return when it is over."""
        start = max(time, self.spans[-1].end) if self.spans else time
        if seconds:
            self.spans.append(ExchangeSpan(what, stage, start, start + seconds))
        return start + seconds


def _use(ops: Sequence[Op], stage: int, each: bool) -> BucketUse:
    """The ops around which a rank needs the parameters of a stage, and behind which it sums its gradients."""
    stage_ops = [op for op in ops if op.stage == stage]
    last = next((op for op in reversed(stage_ops) if Phase.W in PHASES[op.kind]), stage_ops[-1])
    if not each:
        return once(stage_ops[0], last)
    return per_use(
        ops,
        lambda op: op.stage == stage and op.kind is not OpKind.W,
        lambda op: op.stage == stage and Phase.W in PHASES[op.kind],
        last,
    )
