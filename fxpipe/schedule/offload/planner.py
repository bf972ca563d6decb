"""The offload planner: which activations are offloaded between F and B or W, and when (2503.01328).

The order of the ops does not change: an activation is offloaded only if the offload and the reload end before
its user starts, so that no op waits for a transfer.  An offload starts after F as soon as its link is free, a
reload as late as the link allows.  Where a link cannot carry the share that is asked for, less is offloaded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from fxpipe.errors import LimitError, ScheduleError
from fxpipe.schedule.costs import Costs, Link
from fxpipe.schedule.memory_text import ANY_UNIT, MemoryText
from fxpipe.schedule.ops import PHASES, Direction, Phase, Transfer
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.schedule.simulation.transfers import offload_bytes

HALF, FULL = 0.5, 1.0
"""The shares of PipeOffload's PO-H and PO-F."""

AUTO = "auto"
Share = float | str | None
"""How much to offload: a share; ``AUTO``, as much as a memory limit requires; or None for nothing."""

_STEPS = 32  # resolution of the shares that are tried for a memory limit


@dataclass(frozen=True)
class OffloadPlan:
    """``timeline`` includes the transfers; ``asked`` and ``moved`` count activations: one for each stage,
    microbatch and user (B or W)."""

    timeline: Timeline
    asked: int
    moved: int


class Lifetime(NamedTuple):
    """An activation is live from the end of its F to the start of its user: ops ``first`` and ``last`` of the
    rank's order."""

    stage: int
    microbatch: int
    user: Phase
    begin: float
    end: float
    first: int
    last: int
    bytes: float

    @property
    def length(self) -> float:
        return self.end - self.begin


def offload(timeline: Timeline, share: float) -> OffloadPlan:
    """Offload this share of each rank's activations, or as much of it as the links carry.

    Stage by stage, the longest lifetimes first; of the last stage, microbatches evenly spread.
    Raises ScheduleError for a share outside 0 … 1, and where the costs have no link.
    """
    if not 0 <= share <= 1:
        raise ScheduleError(f"the share to offload is {share:g}; it must be from 0 to 1")
    return _Planner(timeline).plan([share] * timeline.schedule.ranks)


def offload_within(
    timeline: Timeline,
    limits: Sequence[float],
    text: MemoryText = ANY_UNIT,
    able: Collection[tuple[int, Phase]] | None = None,
) -> OffloadPlan:
    """Offload about the smallest share that keeps every rank within its memory limit.

    able: what can be moved, by stage and user; by default all.
    Raises ScheduleError, naming the smallest limit that can be kept, if offloading as much as the links carry
    does not suffice.
    """
    planner, ranks = _Planner(timeline, able), range(timeline.schedule.ranks)
    most = planner.plan([FULL] * len(ranks))
    if not most.timeline.fits(limits):
        peaks = most.timeline.peak_memory
        raise LimitError(
            f"schedule {timeline.schedule.name} cannot be offloaded into the memory limit of "
            f"{text.limit(limits)}; the smallest that it can keep with these links is {text.enough(peaks)}. "
            "To need less, take a faster link, another schedule, more stages per rank, or recompute "
            "activations",
            text.whole(peaks),
        )
    # Per link, in steps: does not keep the limit, keeps it.  No op waits for a transfer, so a rank's memory
    # does not depend on other links, and all links are tried together.
    low, high = [-1] * len(planner.links), [_STEPS] * len(planner.links)

    def shares(steps: Sequence[int]) -> list[float]:
        return [step / _STEPS for link, step in zip(planner.links, steps, strict=True) for _ in link]

    while any(b - a > 1 for a, b in zip(low, high, strict=True)):
        middle = [(a + b) // 2 if b - a > 1 else b for a, b in zip(low, high, strict=True)]
        peaks = planner.plan(shares(middle)).timeline.peak_memory
        for k, link in enumerate(planner.links):
            if all(peaks[rank] <= limits[rank] * (1 + 1e-9) for rank in link):
                high[k] = middle[k]
            else:
                low[k] = middle[k]
    return planner.plan(shares(high))


def with_offload(
    timeline: Timeline, share: float | str, limits: Sequence[float], text: MemoryText
) -> Timeline:
    """The timeline with this share offloaded, or with ``AUTO`` as much as the limits require.

    Raises LimitError if the result does not keep the limits.
    """
    if isinstance(share, str):
        return offload_within(timeline, limits, text).timeline
    offloaded = offload(timeline, share).timeline
    if not offloaded.fits(limits):
        peaks = offloaded.peak_memory
        raise LimitError(
            f"schedule {timeline.schedule.name} with {share:.0%} to offload takes {text.enough(peaks)}, "
            f"above the memory limit of {text.limit(limits)}. Offload more, or 'auto', raise the limit, or "
            "recompute",
            text.whole(peaks),
        )
    return offloaded


class _Planner:
    def __init__(self, timeline: Timeline, able: Collection[tuple[int, Phase]] | None = None) -> None:
        if timeline.costs.link is None:
            raise ScheduleError("nothing can be offloaded: the costs have no link; give its seconds per byte")
        self.timeline = timeline
        ranks = range(timeline.schedule.ranks)
        sharing = timeline.costs.link.ranks
        self.seconds = timeline.costs.link.seconds
        self.links = [ranks[first : first + sharing] for first in range(0, len(ranks), sharing)]
        self.starts = [[span.start for span in spans] for spans in timeline.spans]
        self.ends = [[span.end for span in spans] for spans in timeline.spans]
        self.lifetimes = [_lifetimes(timeline, rank, able) for rank in ranks]
        self.epsilon = 1e-9 * timeline.seconds

    def plan(self, shares: Sequence[float]) -> OffloadPlan:
        wanted = [_spread(lifetimes, share) for lifetimes, share in zip(self.lifetimes, shares, strict=True)]
        transfers: list[tuple[float, Lifetime, Transfer]] = []
        for link in self.links:
            on_link = self._carried([lifetime for rank in link for lifetime in wanted[rank]])
            out, back = self._slots(on_link)
            positions = self._untangled(on_link, out, back)
            for lifetime in on_link:
                (end, begin), key = positions[lifetime], (lifetime.stage, lifetime.microbatch, lifetime.user)
                gone = Transfer(Direction.OUT, *key, lifetime.first + 1, end)
                there = Transfer(Direction.IN, *key, begin, lifetime.last)
                transfers += [(lifetime.begin, lifetime, gone), (back[lifetime], lifetime, there)]
        transfers.sort(key=lambda entry: entry[:2])
        schedule = replace(self.timeline.schedule, transfers=tuple(t for _, _, t in transfers))
        simulated = simulate(schedule, self.timeline.costs, self.timeline.of_each)
        return OffloadPlan(simulated, sum(map(len, wanted)), len(transfers) // 2)  # out and back

    def _rank(self, lifetime: Lifetime) -> int:
        return self.timeline.schedule.placement[lifetime.stage]

    def _untangled(
        self, lifetimes: Sequence[Lifetime], out: Mapping[Lifetime, float], back: Mapping[Lifetime, float]
    ) -> dict[Lifetime, tuple[int, int]]:
        """The end position of each activation's offload and the start position of its reload.

        An offload that would delay a reload is waited for one op later.
        """
        positions = {
            lifetime: self._positions(lifetime, out[lifetime], back[lifetime]) for lifetime in lifetimes
        }
        first: dict[tuple[int, int], float] = {}  # rank, position -> start of its first reload
        for lifetime, (_, begin) in positions.items():
            position = self._rank(lifetime), begin
            first[position] = min(back[lifetime], first.get(position, inf))
        for lifetime, (end, begin) in positions.items():
            if out[lifetime] > first.get((self._rank(lifetime), end), inf) + self.epsilon:
                positions[lifetime] = end + 1, begin
        return positions

    def _positions(self, lifetime: Lifetime, out: float, back: float) -> tuple[int, int]:
        """Positions of the op before which the offload ends, and of the op before which the reload starts."""
        rank = self._rank(lifetime)
        end = max(lifetime.first + 1, bisect_left(self.starts[rank], out - self.epsilon))
        return end, bisect_right(self.ends[rank], back + self.epsilon)

    def _carried(self, wanted: Sequence[Lifetime]) -> list[Lifetime]:
        """The activations that one link carries in time, long lifetimes first."""
        on_time, dropped = list(wanted), list[Lifetime]()
        while late := self._late(on_time):
            gone = set(sorted(late, key=lambda lifetime: lifetime.length)[: (len(late) + 1) // 2])
            dropped += gone
            on_time = [lifetime for lifetime in on_time if lifetime not in gone]
        return self._with_more(on_time, dropped)  # fewer than half of the late ones may have sufficed

    def _with_more(self, on_time: list[Lifetime], others: list[Lifetime]) -> list[Lifetime]:
        """The activations ``on_time``, and as many others as the link carries too, long lifetimes first."""
        others = sorted(others, key=lambda lifetime: -lifetime.length)
        step = len(others)
        while step:
            trial = [*on_time, *others[:step]]
            if self._late(trial):
                step //= 2
            else:
                on_time, others = trial, others[step:]
                step = min(step, len(others))
        return on_time

    def _late(self, lifetimes: Sequence[Lifetime]) -> list[Lifetime]:
        """The activations for which no op runs between the end of the offload and the start of the reload."""
        out, back = self._slots(lifetimes)
        late = []
        for lifetime in lifetimes:
            end, begin = self._positions(lifetime, out[lifetime], back[lifetime])
            if end >= begin:
                late.append(lifetime)
        return late

    def _slots(self, lifetimes: Sequence[Lifetime]) -> tuple[dict[Lifetime, float], dict[Lifetime, float]]:
        """The end of each offload, as early as possible, and the start of each reload, as late as possible.

        A link carries one transfer at a time in each direction.
        """
        out: dict[Lifetime, float] = {}
        free = -inf
        for lifetime in sorted(lifetimes, key=lambda lifetime: (lifetime.begin, lifetime)):
            free = out[lifetime] = max(free, lifetime.begin) + self.seconds * lifetime.bytes
        back: dict[Lifetime, float] = {}
        free = inf
        for lifetime in sorted(lifetimes, key=lambda lifetime: (lifetime.end, lifetime), reverse=True):
            free = back[lifetime] = min(free, lifetime.end) - self.seconds * lifetime.bytes
        return out, back


def _lifetimes(
    timeline: Timeline, rank: int, able: Collection[tuple[int, Phase]] | None
) -> list[list[Lifetime]]:
    """Groups of a rank's lifetimes by stage and user, in microbatch order; the longest group first."""
    first: dict[tuple[int, int], tuple[float, int]] = {}
    by_use: dict[tuple[int, Phase], list[Lifetime]] = {}
    for position, (op, start, end) in enumerate(timeline.spans[rank]):
        for user in PHASES[op.kind]:
            if user is Phase.F:
                first[op.stage, op.microbatch] = end, position
                continue
            size = offload_bytes(timeline.costs_of(op.microbatch).stages[op.stage], user)
            if size and (able is None or (op.stage, user) in able):
                begin, behind = first[op.stage, op.microbatch]
                lifetime = Lifetime(op.stage, op.microbatch, user, begin, start, behind, position, size)
                by_use.setdefault((op.stage, user), []).append(lifetime)
    groups = [sorted(group, key=lambda lifetime: lifetime.microbatch) for group in by_use.values()]
    return sorted(groups, key=lambda group: -sum(lifetime.length for lifetime in group))


def _spread(groups: Sequence[Sequence[Lifetime]], share: float) -> list[Lifetime]:
    """A share of all bytes: whole groups, then evenly spread microbatches of the next group."""
    sizes = [sum(lifetime.bytes for lifetime in group) for group in groups]
    left = share * sum(sizes)
    wanted = []
    for group, size in zip(groups, sizes, strict=True):
        part = min(1.0, left / size)
        wanted += [
            lifetime for j, lifetime in enumerate(group) if int((j + 1) * part + 1e-9) > int(j * part + 1e-9)
        ]
        left -= part * size
    return wanted


def with_link(costs: Costs, k: float, ranks_per_link: int = 1) -> Costs:
    """The costs with a link: one way, a microbatch's activations on a rank take ``k`` times the rank's work
    on a microbatch (both are means over the ranks).

    If no stage says which activations can be offloaded, all can: those that W needs until W, others until B.
    """
    stages = costs.stages
    if not any(cost.offloadable or cost.offloadable_for_weight for cost in stages):
        stages = tuple(
            replace(
                cost,
                offloadable=max(0.0, cost.saved_activations - cost.saved_for_weight),
                offloadable_for_weight=min(cost.saved_activations, cost.saved_for_weight),
            )
            for cost in stages
        )
    saved = sum(cost.saved_activations for cost in stages)
    seconds = k * sum(cost.total for cost in stages) / saved if saved else 0.0
    return replace(costs, stages=stages, link=Link(seconds, ranks_per_link))
