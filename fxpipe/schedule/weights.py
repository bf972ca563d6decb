"""Where the W ops go.

A *spine* is per rank the order of F and B alone; it fixes what the ranks wait for.  No F or B waits
for a W, so a W may be put anywhere after its B: where it fills a gap, or where its memory is needed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from math import inf

from fxpipe.errors import DeadlockError, ScheduleError
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.dependencies import SECTION_KINDS, SECTIONS_PER_STAGE, durations, needs, sections
from fxpipe.schedule.ops import Op, OpKind, Order


class Gap(StrEnum):
    """Which gaps in the spine a W may go into."""

    ANY = "any"  # it may delay the spine
    WHOLE = "whole"  # only gaps that hold it whole
    LEAST = "least"  # smaller ones too, where this rank's idle time would otherwise become the largest


def lag(spine: Order, behind: Callable[[int], int]) -> Order:
    """On every rank each W follows its B by ``behind(rank)`` further B ops."""
    return tuple(_lag(ops, behind(rank)) for rank, ops in enumerate(spine))


def _lag(ops: Sequence[Op], behind: int) -> tuple[Op, ...]:
    out: list[Op] = []
    pending: deque[Op] = deque()
    for op in ops:
        out.append(op)
        if op.kind is OpKind.B:
            pending.append(_weight(op))
            if len(pending) > behind:
                out.append(pending.popleft())
    return (*out, *pending)


def fill(spine: Order, placement: tuple[int, ...], costs: Costs, limits: Sequence[float], gap: Gap) -> Order:
    """Puts W ops into the gaps that the spine has under these costs (the heuristic of 2401.10241).

    ``limits`` are per rank, in the unit of ``saved`` and ``kept``: a W runs at once where the next F
    would exceed it.  Raises ScheduleError where no W is left that could make room, DeadlockError where
    the spine itself cannot progress.
    """
    return _Fill(spine, placement, costs, limits, gap).finish()


def _weight(backward: Op) -> Op:
    return Op(OpKind.W, backward.stage, backward.microbatch)


class _Fill:
    """An event-driven run of all ranks.  An event is (time, rank): the rank may be able to go on."""

    def __init__(
        self, spine: Order, placement: tuple[int, ...], costs: Costs, limits: Sequence[float], gap: Gap
    ) -> None:
        self.spine, self.costs, self.limits, self.gap = spine, costs, limits, gap
        self.needs, self.durations = needs(costs, placement), durations(costs)
        self.sections = sections(len(placement))
        self.wakes: dict[int, list[tuple[int, float]]] = {}  # section -> (rank, delay), …
        for kind in SECTION_KINDS:
            for stage, sources in enumerate(self.needs[kind]):
                for section, delay in sources:
                    if placement[stage] != placement[section // SECTIONS_PER_STAGE]:
                        self.wakes.setdefault(section, []).append((placement[stage], delay))
        self.ended: dict[tuple[int, int], float] = {}  # (section, microbatch) -> time
        self.order: list[list[Op]] = [[] for _ in spine]
        self.pending: list[deque[Op]] = [deque() for _ in spine]
        self.next = [0] * len(spine)  # position in the spine
        self.live, self.free, self.idle = ([0.0] * len(spine) for _ in range(3))
        # Times that differ by rounding alone are one time.
        self.tick = 1e-9 * sum(cost.total for cost in costs.stages)

    def finish(self) -> Order:
        self.events = [(0.0, rank) for rank in range(len(self.spine))]
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.free[rank] <= now + self.tick:
                op = self._choose(rank, now)
                if op is not None:
                    self._run(rank, op, now)
        left = [(*ops[self.next[r] :], *self.pending[r]) for r, ops in enumerate(self.spine)]
        if any(left):
            waits = ", ".join(f"rank {rank} at {ops[0]}" for rank, ops in enumerate(left) if ops)
            raise DeadlockError(f"the order of F and B cannot progress: {waits}")
        return tuple(tuple(ops) for ops in self.order)

    def _choose(self, rank: int, now: float) -> Op | None:
        """The op to start now, taken off its queue; None to wait for the next event."""
        ready = inf
        full = False
        if self.next[rank] < len(self.spine[rank]):
            op = self.spine[rank][self.next[rank]]
            full = not self._has_room(rank, op)
            ready = self._arrival(op)
            if ready <= now + self.tick and not full:
                self.next[rank] += 1
                return op
        pending = self.pending[rank]
        if not pending or self._arrival(pending[0]) > now + self.tick:
            return None
        if full or self._may_fill(rank, now, ready, self.durations[OpKind.W][pending[0].stage]):
            return pending.popleft()
        return None

    def _has_room(self, rank: int, op: Op) -> bool:
        if op.kind is not OpKind.F:
            return True
        cost = self.costs.stages[op.stage]
        limit = self.limits[rank]
        if self.live[rank] + max(cost.saved, cost.kept) <= limit * (1 + 1e-9):
            return True
        if not self.pending[rank]:
            raise ScheduleError(
                f"rank {rank} cannot run {op} within its memory limit of {limit:g}: {self.live[rank]:g} is "
                f"live, the op saves {cost.saved:g}, and no W is left to run; raise the limit"
            )
        return False

    def _may_fill(self, rank: int, now: float, ready: float, seconds: float) -> bool:
        """May a W of so many seconds start now, when the spine goes on at ``ready``?"""
        if self.gap is Gap.ANY or now + seconds <= ready + self.tick:
            return True
        return self.gap is Gap.LEAST and self.idle[rank] + ready - now > max(self.idle) + self.tick

    def _arrival(self, op: Op) -> float:
        """When all that the op needs is on its rank; infinite while that is not known."""
        return max(
            (
                self.ended.get((section, op.microbatch), inf) + delay
                for section, delay in self.needs[op.kind][op.stage]
            ),
            default=0.0,
        )

    def _run(self, rank: int, op: Op, now: float) -> None:
        start = max(now, self.free[rank], self._arrival(op))
        if self.order[rank]:
            self.idle[rank] += start - self.free[rank]
        end = self.free[rank] = start + self.durations[op.kind][op.stage]
        self.order[rank].append(op)
        cost = self.costs.stages[op.stage]
        match op.kind:
            case OpKind.F:
                self.live[rank] += max(cost.saved, cost.kept)
            case OpKind.B:
                self.live[rank] -= max(cost.saved, cost.kept) - cost.kept
                self.pending[rank].append(_weight(op))
            case _:
                self.live[rank] -= cost.kept
        heapq.heappush(self.events, (end, rank))
        for section in self.sections[op.kind][op.stage]:
            self.ended[section, op.microbatch] = end
            for other, delay in self.wakes.get(section, ()):
                heapq.heappush(self.events, (end + delay, other))
