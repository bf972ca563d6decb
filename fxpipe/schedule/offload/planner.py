"""Which activations leave their rank between F and B or W, and when (2503.01328).

The ops of the schedule stay where they are: an activation is moved only where it is away and back before
it is wanted, so that nothing waits for it.  An offload begins at the first free moment of its link behind F,
a reload as late as the link allows.  Where a link cannot carry all that is asked for, less is moved.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from fxpipe.errors import LimitError, ScheduleError
from fxpipe.ir.graph import Phase
from fxpipe.schedule.costs import Costs, Link
from fxpipe.schedule.offload.transfers import away_bytes
from fxpipe.schedule.ops import PHASES, Direction, Transfer
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline

HALF, FULL = 0.5, 1.0
"""The shares of PipeOffload's PO-H and PO-F."""

AUTO = "auto"
Share = float | str | None
"""What to move: a share, or ``AUTO``, as much as a memory limit asks for; None for nothing."""

_STEPS = 32  # shares that are told apart for a memory limit


@dataclass(frozen=True)
class Offload:
    """``timeline`` has the transfers; ``asked`` and ``moved`` count activations: one for each stage,
    microbatch and gradient that it is saved for."""

    timeline: Timeline
    asked: int
    moved: int


class _Stay(NamedTuple):
    """An activation from the end of F to the start of its user, which are ops ``first`` and ``last`` of their
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


def offload(timeline: Timeline, share: float) -> Offload:
    """Move this share of each rank's activations, or as much of it as the links carry.

    Those that stay the longest go first, a stage's at a time; of the last one, microbatches evenly spread.
    Raises ScheduleError for a share outside 0 … 1, and where the costs have no link.
    """
    if not 0 <= share <= 1:
        raise ScheduleError(f"the share to offload is {share:g}; it must be from 0 to 1")
    return _Planner(timeline).plan([share] * timeline.schedule.ranks)


def offload_within(timeline: Timeline, limits: Sequence[float]) -> Offload:
    """About the least that keeps every rank within its memory limit.

    Raises ScheduleError, naming the smallest limit that can be kept, where all that the links carry is not
    enough.
    """
    planner, ranks = _Planner(timeline), range(timeline.schedule.ranks)
    most = planner.plan([FULL] * len(ranks))
    if not keeps(most.timeline, limits):
        smallest = max(most.timeline.peak_memory)
        raise LimitError(
            f"schedule {timeline.schedule.name} cannot be offloaded into the memory limit of "
            f"{min(limits):g}; the smallest that it can keep with these links is {smallest:g}. To need less, "
            "take a faster link, another schedule, more stages per rank, or recompute activations",
            smallest,
        )
    shares = [FULL] * len(ranks)
    for link in planner.links:
        low, high = -1, _STEPS  # in steps: too little, enough
        while high - low > 1:
            middle = (low + high) // 2
            trial = [middle / _STEPS if rank in link else 0.0 for rank in ranks]
            peaks = planner.plan(trial).timeline.peak_memory
            if all(peaks[rank] <= limits[rank] * (1 + 1e-9) for rank in link):
                high = middle
            else:
                low = middle
        for rank in link:
            shares[rank] = high / _STEPS
    return planner.plan(shares)


def lightened(timeline: Timeline, share: float | str, limits: Sequence[float]) -> Timeline:
    """With a share moved, or as much as the limits ask for.

    Raises LimitError where that does not keep the limits.
    """
    if isinstance(share, str):
        return offload_within(timeline, limits).timeline
    found = offload(timeline, share).timeline
    if not keeps(found, limits):
        smallest = max(found.peak_memory)
        raise LimitError(
            f"schedule {timeline.schedule.name} with {share:.0%} to offload takes {smallest:g}, above the "
            f"memory limit of {min(limits):g}. Offload more, or 'auto', raise the limit, or recompute",
            smallest,
        )
    return found


def keeps(timeline: Timeline, limits: Sequence[float]) -> bool:
    peaks = zip(timeline.peak_memory, limits, strict=True)
    return all(peak <= limit * (1 + 1e-9) for peak, limit in peaks)


class _Planner:
    def __init__(self, timeline: Timeline) -> None:
        if timeline.costs.link is None:
            raise ScheduleError("nothing can be offloaded: the costs have no link")
        self.timeline = timeline
        ranks = range(timeline.schedule.ranks)
        sharing = timeline.costs.link.ranks
        self.seconds = timeline.costs.link.seconds
        self.links = [ranks[first : first + sharing] for first in range(0, len(ranks), sharing)]
        self.starts = [[span.start for span in spans] for spans in timeline.spans]
        self.ends = [[span.end for span in spans] for spans in timeline.spans]
        self.stays = [_stays(timeline, rank) for rank in ranks]
        self.tick = 1e-9 * timeline.seconds

    def plan(self, shares: Sequence[float]) -> Offload:
        wanted = [_spread(stays, share) for stays, share in zip(self.stays, shares, strict=True)]
        carried = [
            s for link in self.links for s in self._carried([s for rank in link for s in wanted[rank]])
        ]
        transfers: list[tuple[float, _Stay, Transfer]] = []
        for link in self.links:
            own = [s for s in carried if self._rank(s) in link]
            out, back = self._slots(own)
            positions = self._untangled(own, out, back)
            for stay in own:
                (end, begin), key = positions[stay], (stay.stage, stay.microbatch, stay.user)
                gone = Transfer(Direction.OUT, *key, stay.first + 1, end)
                there = Transfer(Direction.IN, *key, begin, stay.last)
                transfers += [(stay.begin, stay, gone), (back[stay], stay, there)]
        transfers.sort(key=lambda entry: entry[:2])
        schedule = replace(self.timeline.schedule, transfers=tuple(t for _, _, t in transfers))
        return Offload(simulate(schedule, self.timeline.costs), sum(map(len, wanted)), len(carried))

    def _rank(self, stay: _Stay) -> int:
        return self.timeline.schedule.placement[stay.stage]

    def _untangled(
        self, stays: Sequence[_Stay], out: Mapping[_Stay, float], back: Mapping[_Stay, float]
    ) -> dict[_Stay, tuple[int, int]]:
        """The positions of each; where an offload would hold up a reload, it is waited for one op later."""
        positions = {stay: self._positions(stay, out[stay], back[stay]) for stay in stays}
        first: dict[tuple[int, int], float] = {}  # rank, position -> when the first reload begins there
        for stay, (_, begin) in positions.items():
            place = self._rank(stay), begin
            first[place] = min(back[stay], first.get(place, inf))
        for stay, (end, begin) in positions.items():
            if out[stay] > first.get((self._rank(stay), end), inf) + self.tick:
                positions[stay] = end + 1, begin
        return positions

    def _positions(self, stay: _Stay, out: float, back: float) -> tuple[int, int]:
        """The op before which it is away, and the one before which it is fetched from there."""
        rank = self._rank(stay)
        end = max(stay.first + 1, bisect_left(self.starts[rank], out - self.tick))
        return end, bisect_right(self.ends[rank], back + self.tick)

    def _carried(self, wanted: Sequence[_Stay]) -> list[_Stay]:
        """As many activations as one link carries in time, those that stay long first."""
        kept, dropped = list(wanted), list[_Stay]()
        while late := self._late(kept):
            gone = set(sorted(late, key=lambda stay: stay.length)[: (len(late) + 1) // 2])
            dropped += gone
            kept = [stay for stay in kept if stay not in gone]
        return self._with_more(kept, dropped)  # half of the late ones may have been more than it took

    def _with_more(self, kept: list[_Stay], others: list[_Stay]) -> list[_Stay]:
        """With as many of the others as go beside them, those that stay long first."""
        others = sorted(others, key=lambda stay: -stay.length)
        step = len(others)
        while step:
            trial = [*kept, *others[:step]]
            if self._late(trial):
                step //= 2
            else:
                kept, others = trial, others[step:]
                step = min(step, len(others))
        return kept

    def _late(self, stays: Sequence[_Stay]) -> list[_Stay]:
        """Those that would have to come back before an op ran without them."""
        out, back = self._slots(stays)
        late = []
        for stay in stays:
            end, begin = self._positions(stay, out[stay], back[stay])
            if end >= begin:
                late.append(stay)
        return late

    def _slots(self, stays: Iterable[_Stay]) -> tuple[dict[_Stay, float], dict[_Stay, float]]:
        """When each is away, and when it begins to come back: out as early, back as late as one link can, one
        at a time in each direction."""
        stays = list(stays)
        out: dict[_Stay, float] = {}
        free = -inf
        for stay in sorted(stays, key=lambda stay: (stay.begin, stay)):
            free = out[stay] = max(free, stay.begin) + self.seconds * stay.bytes
        back: dict[_Stay, float] = {}
        free = inf
        for stay in sorted(stays, key=lambda stay: (stay.end, stay), reverse=True):
            free = back[stay] = min(free, stay.end) - self.seconds * stay.bytes
        return out, back


def _stays(timeline: Timeline, rank: int) -> list[list[_Stay]]:
    """A rank's activations, by stage and user, each in the order of the microbatches; the longest first."""
    first: dict[tuple[int, int], tuple[float, int]] = {}
    found: dict[tuple[int, Phase], list[_Stay]] = {}
    for position, (op, start, end) in enumerate(timeline.spans[rank]):
        for user in PHASES[op.kind]:
            if user is Phase.F:
                first[op.stage, op.microbatch] = end, position
                continue
            size = away_bytes(timeline.costs.stages[op.stage], user)
            if size:
                begin, behind = first[op.stage, op.microbatch]
                stay = _Stay(op.stage, op.microbatch, user, begin, start, behind, position, size)
                found.setdefault((op.stage, user), []).append(stay)
    groups = [sorted(own, key=lambda stay: stay.microbatch) for own in found.values()]
    return sorted(groups, key=lambda own: -sum(stay.length for stay in own))


def _spread(groups: Sequence[Sequence[_Stay]], share: float) -> list[_Stay]:
    """So large a share of all bytes: whole groups, then some microbatches of the next."""
    left = share * sum(own[0].bytes for own in groups)
    wanted = []
    for own in groups:
        part = min(1.0, left / own[0].bytes)
        wanted += [stay for j, stay in enumerate(own) if int((j + 1) * part + 1e-9) > int(j * part + 1e-9)]
        left -= part * own[0].bytes
    return wanted


def with_link(costs: Costs, k: float, ranks_per_link: int = 1) -> Costs:
    """The costs with a link that takes, one way, ``k`` times a rank's work for a microbatch's activations on
    it (both are means over the ranks).

    Stages of which it is not known what may leave: all that they save, what W needs until W and the rest
    until B.
    """
    stages = costs.stages
    if not any(cost.away or cost.away_for_weight for cost in stages):
        stages = tuple(
            replace(cost, away=max(0.0, cost.saved - cost.kept), away_for_weight=min(cost.saved, cost.kept))
            for cost in stages
        )
    saved = sum(cost.saved for cost in stages)
    seconds = k * sum(cost.total for cost in stages) / saved if saved else 0.0
    return replace(costs, stages=stages, link=Link(seconds, ranks_per_link))
