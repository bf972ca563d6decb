"""The fastest order of a plan's ops for the microbatches of a batch, each of its own lengths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from math import ceil, inf
from operator import le
from typing import Self

from fxpipe.errors import ScheduleError, SizeError
from fxpipe.plan.artifact import OffloadSlot, Plan
from fxpipe.plan.step import NamedLength, refused
from fxpipe.plan.work import PlanWork
from fxpipe.runtime.program.offload import ALIGNMENT, aligned
from fxpipe.schedule.costs import Costs, most_of
from fxpipe.schedule.offload.memory_pool import Pool, pools
from fxpipe.schedule.offload.planner import offload_within
from fxpipe.schedule.ops import Schedule, Transfer
from fxpipe.schedule.placement import stages_of
from fxpipe.schedule.search.uneven import LOOKS_A_SECOND, WORK, TooLarge, Uneven
from fxpipe.schedule.simulation.memory import rank_over
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.schedule.simulation.transfers import offload_bytes

_CLEAR = 0.02
#: Of the limits: what orders may hold before something of it is offloaded.
_MORE = 1.3, 2.0
_Lengths = tuple[tuple[str, int], ...]
OfReplica = tuple[Sequence[Mapping[str, int]], Sequence[float]]
"""The lengths of a replica's microbatches, and their shares."""


@dataclass(frozen=True, eq=False)
class BatchPlanner:
    """Orders for microbatches of any lengths on the stages of a schedule, within a memory for activations.

    ``schedule``: for microbatches as the example, of which ``example`` has the costs.  ``work``: those at
    other lengths; without it they are those of the example, as of an evaluation.  ``limits``: of each rank.
    ``in_order``: whether microbatches must come in theirs.  ``slots``: what can be offloaded, within
    ``pools``, the bytes of each rank.  ``names``: the dimensions with other lengths than the example's.
    """

    schedule: Schedule
    example: Costs
    work: PlanWork | None
    limits: tuple[float, ...]
    in_order: bool = False
    slots: tuple[OffloadSlot, ...] = ()
    pools: tuple[int, ...] = ()
    names: tuple[NamedLength, ...] = ()
    _costs: dict[tuple[_Lengths, float], Costs] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> Self:
        limits = plan.limits or own_limits(plan.ordered, plan.costs, plan.prediction.peak_memory)
        if not plan.limits and plan.work is not None:
            limits = _with_most_rows(plan, plan.work, limits)
        changes, names = bool(plan.changed), plan.step.lengths
        return cls(plan.ordered, plan.costs, plan.work, limits, changes, plan.slots, plan.pools, names)

    @cached_property
    def without_limits(self) -> BatchPlanner:
        return replace(self, limits=(inf,) * len(self.limits))

    def timeline(
        self,
        lengths: Sequence[Mapping[str, int]],
        shares: Sequence[float] = (),
        others: Sequence[OfReplica] = (),
    ) -> Timeline:
        """The fastest order for microbatches of these lengths, simulated.

        shares: of each, see ``costs``; without them a microbatch is one document.  others: lengths and shares
        of other replicas, which run the same order: each microbatch takes as long as the slowest of those
        with its number.
        Raises ScheduleError, with the microbatch and its lengths, where one of them does not fit the limits.
        """
        replicas = [(lengths, shares or [1.0] * len(lengths)), *others]
        of_replicas = [[*map(self.costs, *each)] for each in replicas]
        costs = tuple(most_of([*filter(None, each)]) for each in zip_longest(*of_replicas))
        timelines = []
        if len(costs) == self.schedule.microbatches:
            # Of more rows than the example's, microbatches may be larger.
            planned = simulate(self.schedule, self.example, costs)
            if all(map(self._is_example, *replicas[0])) and len(replicas) == 1:
                return planned  # which runs the programs as they are
            timelines = [planned] if planned.fits(self.limits) else []
        try:
            timelines.append(self._searched(costs))
        except ScheduleError as error:
            timelines += self._offloading(costs)
            if not timelines:
                raise self._too_large(error, [each for each, _ in replicas]) from error
        else:
            timelines += self._offloading(costs)
        return min(timelines, key=lambda one: one.seconds)

    def _searched(self, costs: tuple[Costs, ...], limits: Sequence[float] | None = None) -> Timeline:
        """limits: by default those for activations."""
        planned = self.schedule
        limits = self.limits if limits is None else tuple(limits)
        lookups = 0 if planned.vocabulary is None else planned.vocabulary.embedding_shards
        problem = Uneven(costs, planned.placement, limits, planned.joined, self.in_order, lookups)
        # The search takes no longer than the step: of short ones little can be gained.
        order = problem.best(int(min(WORK, problem.bound * LOOKS_A_SECOND)))
        schedule = Schedule(
            f"{planned.name} by lengths", planned.placement, len(costs), order, planned.vocabulary
        )
        return simulate(schedule, self.example, costs)

    def _offloading(self, costs: tuple[Costs, ...]) -> Iterator[Timeline]:
        """Orders that hold more than the limits, of which as much leaves as keeps them."""
        able = {(slot.stage, slot.user) for slot in self.slots}
        for share in _MORE if able else ():
            try:
                timeline = self._searched(costs, [share * limit for limit in self.limits])
                timeline = offload_within(timeline, self.limits, able=able).timeline
            except ScheduleError:
                continue
            if all(map(le, (pool.bytes for pool in self.pools_of(timeline)), self.pools)):
                yield timeline

    def pools_of(self, timeline: Timeline) -> tuple[Pool, ...]:
        """The pools of a step's offloaded activations; none where it offloads nothing."""
        tensors = {(slot.stage, slot.user): slot.tensors for slot in self.slots}

        def size(transfer: Transfer) -> int:
            of_stage = timeline.costs_of(transfer.microbatch).stages[transfer.stage]
            # Each tensor begins at a multiple of the alignment.
            return aligned(ceil(offload_bytes(of_stage, transfer.user))) + (
                ALIGNMENT * (tensors[transfer.stage, transfer.user] - 1)
            )

        return pools(timeline.schedule, size) if timeline.schedule.transfers else ()

    def _too_large(
        self, error: ScheduleError, replicas: Sequence[Sequence[Mapping[str, int]]]
    ) -> ScheduleError:
        if not isinstance(error, TooLarge):
            return error
        rank = error.rank
        alike = [lengths[error.microbatch] for lengths in replicas if error.microbatch < len(lengths)]
        largest = max(alike, key=lambda each: self._alone(each)[rank])
        named = ", ".join(f"{name} {length}" for name, length in largest.items())
        which = f"microbatch {error.microbatch}" if len(replicas) == 1 else "a microbatch"
        less = [f"{each.name} {n}" for each in self.names if (n := self._most(largest, each)) is not None]
        remedy = f"give at most {' or '.join(less)}, or " if less else ""
        remedy += "compile with more memory_limit"
        if self.schedule.transfers:
            number = self.schedule.microbatches
            remedy = f"give {number} microbatches, for which the plan offloads most, or {remedy}"
        return ScheduleError(f"With {named}, {which} {error.needs}: {remedy}.")

    def _most(self, lengths: Mapping[str, int], one: NamedLength) -> int | None:
        """The most of one length with which a microbatch fits the limits, the others as they are; None if it
        has none."""

        def is_over(n: int) -> bool:
            alone = self._alone({**lengths, one.name: n})
            return rank_over(alone, self.limits) is not None

        able = range(one.least, lengths[one.name], one.step)
        fits = bisect_left(able, x=True, key=is_over)
        return able[fits - 1] if fits else None

    def _alone(self, lengths: Mapping[str, int]) -> tuple[float, ...]:
        """The memory of each rank for a microbatch alone."""
        costs = (self.costs(lengths),)
        return Uneven(costs, self.schedule.placement, (), self.schedule.joined).least

    def costs(self, lengths: Mapping[str, int], share: float = 1.0) -> Costs:
        """The costs of a microbatch of these lengths, found once for each.

        share: of attention of packed documents, the squares of their lengths relative to that of all tokens.
        """
        key = tuple(lengths.items()), share if self._has_packed else 1.0
        if key not in self._costs:
            self._costs[key] = (
                self.example if self.work is None else self.work.costs(self.example, lengths, key[1])
            )
        return self._costs[key]

    def _is_example(self, lengths: Mapping[str, int], share: float) -> bool:
        example = {} if self.work is None else self.work.lengths
        return share == 1 and all(example.get(name) == length for name, length in lengths.items())

    @cached_property
    def _has_packed(self) -> bool:
        return self.work is not None and self.work.has_packed


def sample_cost(plan: Plan) -> tuple[float, float]:
    """Seconds (a, b): a sample of L tokens takes a · L + b · L² of the busiest rank's time for a microbatch
    as the example; b is 0 without attention of packed documents."""
    tokens = plan.step.tokens([{each.name: each.example for each in plan.step.lengths}])
    short, one = _of_documents(plan)
    return short / tokens, (one - short) / tokens**2


def prices_documents(plan: Plan) -> bool:
    """Whether a microbatch as the example takes clearly less time where its packed documents are short."""
    short, one = _of_documents(plan)
    return short < (1 - _CLEAR) * one


def _of_documents(plan: Plan) -> tuple[float, float]:
    """Seconds of the busiest rank for a microbatch as the example: of documents whose attention is nothing,
    and of one document."""
    planner, lengths = BatchPlanner.of(plan), {} if plan.work is None else plan.work.lengths
    of_stages = (planner.costs(lengths, share).stages for share in (0.0, 1.0))
    of_ranks = (
        [sum(stages[s].total for s in placed) for placed in stages_of(plan.placement)] for stages in of_stages
    )
    short, one = map(max, of_ranks)
    return short, one


def own_limits(schedule: Schedule, costs: Costs, peaks: Sequence[float]) -> tuple[float, ...]:
    """What orders may hold where nobody limits it: the peaks of the schedule, and in any case a microbatch of
    the example, of which a schedule that offloads or recomputes may hold less."""
    example = Uneven((costs,), schedule.placement, (), schedule.joined)
    return tuple(map(max, peaks, example.least))


def _with_most_rows(plan: Plan, work: PlanWork, limits: tuple[float, ...]) -> tuple[float, ...]:
    """Limits within which a rank can have the most rows that a microbatch may have: what it holds of each row
    alone, as behind a mean over the tokens, is no larger part of the example.  But no more than the fullest
    rank."""
    names = plan.step.lengths
    shortest = {each.name: each.least for each in names}
    most = shortest | {each.name: each.most(names, shortest) for each in names if each.leading}
    if most == shortest:
        return limits
    alone = Uneven((work.costs(plan.costs, most),), plan.placement, (), plan.ordered.joined).least
    return tuple(max(limit, min(one, max(limits))) for limit, one in zip(limits, alone, strict=True))


def named_lengths(
    names: Sequence[NamedLength], given: Sequence[Mapping[str, int] | int]
) -> list[dict[str, int]]:
    """The lengths of microbatches by name: numbers are those of the one name that there is.

    Raises SizeError for none, for names that programs do not have, and for lengths that they do not take.
    """
    if not names:
        raise SizeError(
            "The programs take microbatches of the example's lengths alone: name a dimension of it when you "
            'compile, for example dimensions={"sequence": 512}.'
        )
    if not isinstance(given, Sequence) or not given:
        raise SizeError(f"lengths is {given!r} and must give those of each microbatch.")
    each = []
    for m, lengths in enumerate(given):
        named = {names[0].name: lengths} if type(lengths) is int and len(names) == 1 else lengths
        known = ", ".join(one.name for one in names)
        if not isinstance(named, Mapping) or {*named} != {one.name for one in names}:
            raise SizeError(f"lengths[{m}] is {lengths!r} and must give {known}.")
        if any(type(n) is not int for n in named.values()):
            raise SizeError(f"lengths[{m}] is {lengths!r} and must give {known}, as whole numbers.")
        if (refusal := refused(names, named)) is not None:
            name, text = refusal
            raise SizeError(f"lengths[{m}] has {name} {named[name]}. {text}")
        each.append({one.name: named[one.name] for one in names})
    return each


def filled(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """The samples of as many microbatches as they fill: the longest first, to the fullest with room."""
    places: list[list[int]] = []
    room: list[int] = []
    for k in sorted(range(len(lengths)), key=lambda k: (-lengths[k], k)):
        able = [m for m in range(len(places)) if room[m] >= lengths[k]]
        m = min(able, key=lambda m: (room[m], m), default=len(places))
        if m == len(places):
            places.append([])
            room.append(tokens)
        places[m].append(k)
        room[m] -= lengths[k]
    return [sorted(place) for place in places]
