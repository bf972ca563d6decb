"""Activations sent away between F and B and fetched back in time, over links of their own (2503.01328).

The ops of the schedule stay where they are: a transfer is taken only where it ends before its activation is
wanted, so nothing ever waits for one.  An offload starts at the first free moment of its link behind F, a
reload ends at the last free one before B.  What W needs of it is given up again behind B, where there is time
to fetch it before W.  Where a link cannot carry all that is asked for, less is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.graph import Phase
from fxpipe.schedule.ops import OpKind
from fxpipe.schedule.placement import stages_of
from fxpipe.schedule.timeline import Timeline

Seconds = Callable[[int, Phase], float]
"""How long a link takes, one way, for what a stage saves for its B, or for its W."""

HALF, FULL = 0.5, 1.0
"""The shares of PipeOffload's PO-H and PO-F."""

_STEPS = 32  # shares that are tried for a memory limit


class Direction(StrEnum):
    OUT = "offload"
    IN = "reload"


class Transfer(NamedTuple):
    """What a stage's F saved for one microbatch, on its way; in the unit of the costs' times.

    ``user``: the op that it is fetched for first, B or W.
    """

    direction: Direction
    stage: int
    microbatch: int
    user: Phase
    start: float
    end: float


class _Stay(NamedTuple):
    """An activation from the end of F to the start of B, or from the end of B to the start of W.

    ``away``: a copy of it is there already.
    """

    stage: int
    microbatch: int
    user: Phase
    begin: float
    end: float
    away: bool = False

    @property
    def length(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Offload:
    """``transfers`` are per rank, in the order of their starts; ``asked`` and ``moved`` count activations.

    ``dropped``: per rank when what W needs of one that is away was given up, and of which stage.
    """

    timeline: Timeline
    transfers: tuple[tuple[Transfer, ...], ...]
    dropped: tuple[tuple[tuple[float, int], ...], ...]
    asked: int
    moved: int

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """As :attr:`Timeline.memory`, without what is away."""
        return tuple(map(self._memory_of, range(len(self.transfers))))

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        return tuple(max((live for _, live in steps), default=0.0) for steps in self.memory)

    @cached_property
    def link_busy(self) -> tuple[tuple[float, float], ...]:
        """Per rank the seconds in which its activations go out and come in."""
        return tuple(
            (
                sum(t.end - t.start for t in own if t.direction is Direction.OUT),
                sum(t.end - t.start for t in own if t.direction is Direction.IN),
            )
            for own in self.transfers
        )

    def _memory_of(self, rank: int) -> tuple[tuple[float, float], ...]:
        costs = self.timeline.costs.stages
        changes, before = [], 0.0
        for time, live in self.timeline.memory[rank]:
            changes.append((time, live - before))
            before = live
        for transfer in self.transfers[rank]:
            cost = costs[transfer.stage]
            size = cost.saved if transfer.user is Phase.B else cost.kept
            if transfer.direction is Direction.OUT:
                changes.append((transfer.end, -size))
            else:
                changes.append((transfer.start, size))
        changes += ((time, -costs[stage].kept) for time, stage in self.dropped[rank])
        steps, live = [], 0.0
        for time, change in sorted(changes):  # at one moment, what is freed goes first
            live += change
            steps.append((time, live))
        return tuple(steps)


def offload(timeline: Timeline, seconds: Seconds, share: float, ranks_per_link: int = 1) -> Offload:
    """Move this share of each rank's activations, or as much of it as the links carry.

    The stages whose activations stay the longest go first; of the last one, microbatches evenly spread.
    seconds: of what a stage saves for B or for W, one way.  ranks_per_link: so many neighbouring ranks take
    turns on a link; each direction of a link is by itself.  Raises ScheduleError for a share outside 0 … 1.
    """
    if not 0 <= share <= 1:
        raise ScheduleError(f"the share to offload is {share:g}; it must be from 0 to 1")
    ranks = range(timeline.schedule.ranks)
    stays = [_stays(timeline, rank) for rank in ranks]
    wanted = [_wanted(timeline, rank, own, share) for rank, own in enumerate(stays)]
    transfers: list[list[Transfer]] = [[] for _ in ranks]
    dropped: list[list[tuple[float, int]]] = [[] for _ in ranks]
    home, moved = timeline.schedule.placement, 0
    for first in range(0, len(ranks), ranks_per_link):
        sharing = ranks[first : first + ranks_per_link]
        carried = _carried([stay for rank in sharing for stay in wanted[rank]], seconds)
        moved += len(carried)
        taken = _with_more(carried, _until_weight(stays, wanted, sharing, carried), seconds)
        out, back = _slots(taken, seconds)
        for transfer in (*out.values(), *back.values()):
            transfers[home[transfer.stage]].append(transfer)
        for stay in taken:
            if stay.away:
                dropped[home[stay.stage]].append((stay.begin, stay.stage))
    done = tuple(tuple(sorted(own, key=lambda t: t.start)) for own in transfers)
    return Offload(timeline, done, tuple(map(tuple, dropped)), sum(map(len, wanted)), moved)


def offload_within(timeline: Timeline, seconds: Seconds, limit: float, ranks_per_link: int = 1) -> Offload:
    """The least that keeps every rank within a memory limit.

    Raises ScheduleError, naming the smallest limit that can be kept, where all that the links carry is
    not enough.
    """
    found = [offload(timeline, seconds, k / _STEPS, ranks_per_link) for k in (0, _STEPS)]
    least = min(found, key=lambda plan: max(plan.peak_memory))
    if max(found[0].peak_memory) <= limit * (1 + 1e-9):
        return found[0]
    for k in range(1, _STEPS + 1):
        plan = offload(timeline, seconds, k / _STEPS, ranks_per_link)
        if max(plan.peak_memory) <= limit * (1 + 1e-9):
            return plan
        least = min(least, plan, key=lambda plan: max(plan.peak_memory))
    raise ScheduleError(
        f"schedule {timeline.schedule.name} cannot be offloaded into the memory limit of {limit:g}; the "
        f"smallest that it can keep with these links is {max(least.peak_memory):g}. To need less, take a "
        "faster link, another schedule, more stages per rank, or recompute activations"
    )


def _stays(timeline: Timeline, rank: int) -> dict[tuple[int, int, Phase], _Stay]:
    """All stays of a rank's activations, by stage, microbatch and the op that ends them."""
    last: dict[tuple[int, int], float] = {}
    stays = {}
    for op, start, end in timeline.spans[rank]:
        cost, key = timeline.costs.stages[op.stage], (op.stage, op.microbatch)
        if op.kind is not OpKind.F:
            user = Phase.W if op.kind is OpKind.W else Phase.B
            if cost.kept if user is Phase.W else cost.saved:
                stays[*key, user] = _Stay(*key, user, last[key], start)
        last[key] = end
    return stays


def _wanted(
    timeline: Timeline, rank: int, stays: Mapping[tuple[int, int, Phase], _Stay], share: float
) -> list[_Stay]:
    """The activations to move: whole stages, those that stay the longest first, then some of the next."""
    microbatches = range(timeline.schedule.microbatches)
    stages = [
        [stays[stage, j, Phase.B] for j in microbatches]
        for stage in stages_of(timeline.schedule.placement)[rank]
        if timeline.costs.stages[stage].saved
    ]
    stages.sort(key=lambda own: -sum(stay.length for stay in own))
    left, wanted = share * len(stages), []
    for own in stages:
        part = min(1.0, left)
        wanted += [stay for j, stay in enumerate(own) if int((j + 1) * part + 1e-9) > int(j * part + 1e-9)]
        left -= part
    return wanted


def _until_weight(
    stays: Sequence[Mapping[tuple[int, int, Phase], _Stay]],
    wanted: Sequence[Sequence[_Stay]],
    sharing: Iterable[int],
    carried: Sequence[_Stay],
) -> list[_Stay]:
    """The stays between B and W of the activations that are to be moved."""
    gone, found = set(carried), []
    for rank in sharing:
        for stay in wanted[rank]:
            later = stays[rank].get((stay.stage, stay.microbatch, Phase.W))
            if later is not None:
                found.append(later._replace(away=stay in gone))
    return found


def _carried(wanted: Sequence[_Stay], seconds: Seconds) -> list[_Stay]:
    """As many activations as one link carries in time, those that stay long first."""
    kept, dropped = list(wanted), list[_Stay]()
    while late := _late(kept, seconds):
        gone = set(sorted(late, key=lambda stay: stay.length)[: (len(late) + 1) // 2])
        dropped += gone
        kept = [stay for stay in kept if stay not in gone]
    return _with_more(kept, dropped, seconds)  # half of the late ones may have been more than it took


def _with_more(kept: list[_Stay], others: list[_Stay], seconds: Seconds) -> list[_Stay]:
    """With as many of the others as go beside them, those that stay long first."""
    others = sorted(others, key=lambda stay: -stay.length)
    step = len(others)
    while step:
        trial = [*kept, *others[:step]]
        if _late(trial, seconds):
            step //= 2
        else:
            kept, others = trial, others[step:]
            step = min(step, len(others))
    return kept


def _late(stays: Sequence[_Stay], seconds: Seconds) -> list[_Stay]:
    """Those that would have to come back before they are away."""
    out, back = _slots(stays, seconds)
    return [stay for stay in stays if (out[stay].end if stay in out else stay.begin) > back[stay].start]


def _slots(stays: Iterable[_Stay], seconds: Seconds) -> tuple[dict[_Stay, Transfer], dict[_Stay, Transfer]]:
    """Out as early, back as late as one link can, one at a time in each direction."""
    out: dict[_Stay, Transfer] = {}
    free = float("-inf")
    for stay in sorted(stays, key=lambda stay: (stay.begin, stay)):
        if not stay.away:
            start = max(free, stay.begin)
            free = start + seconds(stay.stage, stay.user)
            out[stay] = Transfer(Direction.OUT, stay.stage, stay.microbatch, stay.user, start, free)
    back: dict[_Stay, Transfer] = {}
    free = float("inf")
    for stay in sorted(stays, key=lambda stay: (stay.end, stay), reverse=True):
        end = min(free, stay.end)
        free = end - seconds(stay.stage, stay.user)
        back[stay] = Transfer(Direction.IN, stay.stage, stay.microbatch, stay.user, free, end)
    return out, back


def one_way(timeline: Timeline, k: float) -> Seconds:
    """Of what a stage saves, where all of a microbatch on a rank takes ``k`` times the rank's work."""
    costs, home = timeline.costs.stages, timeline.schedule.placement
    unit = []
    for own in stages_of(home):
        saved = sum(costs[stage].saved for stage in own)
        unit.append(k * sum(costs[stage].total for stage in own) / saved if saved else 0.0)

    def seconds(stage: int, user: Phase) -> float:
        cost = costs[stage]
        return unit[home[stage]] * (cost.saved if user is Phase.B else cost.kept)

    return seconds
