"""What a schedule is sought for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from fxpipe.errors import ScheduleError
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.ops import Order
from fxpipe.schedule.placement import place
from fxpipe.schedule.shop import Shop, encode, peaks, run, shop

Limit = float | Sequence[float] | None
"""A memory limit of every rank, of each rank, or none; in the unit of the costs' ``saved``."""

_SHORT = 3  # a step of so many microbatches per rank tells which of several orders is the fastest


@dataclass(frozen=True)
class Problem:
    """``costs`` has ``ranks · stages_per_rank`` stages; ``limits`` are per rank, infinite where none is.

    ``group`` is the number of microbatches in a group, where a family has groups and one is asked for;
    ``effort`` the time that a search may take, in what it takes by default.
    """

    name: str
    ranks: int
    microbatches: int
    stages_per_rank: int
    shape: str
    costs: Costs
    limits: tuple[float, ...]
    group: int | None = None
    effort: float = 1.0

    @cached_property
    def placement(self) -> tuple[int, ...]:
        return place(self.shape, self.ranks, self.stages_per_rank)

    @property
    def is_v(self) -> bool:
        """V placement with more than one stage: with one it is the plain one."""
        return self.shape == "v" and self.stages_per_rank > 1

    @property
    def is_limited(self) -> bool:
        return min(self.limits) < inf

    @cached_property
    def shop(self) -> Shop:
        return shop(self.costs, self.placement)

    def like(self, *, limits: tuple[float, ...] | None = None, microbatches: int | None = None) -> Problem:
        """The same with other limits or microbatches."""
        m, limits = microbatches or self.microbatches, self.limits if limits is None else limits
        other = replace(self, limits=limits, microbatches=m)
        other.__dict__["shop"] = self.shop  # which depends on neither
        return other

    def within(self, microbatches: float) -> Problem:
        """The same with limits of so many microbatches' activations, where they are not lower already."""
        caps = [microbatches * self.shop.smallest_limit(rank) for rank in range(self.ranks)]
        return self.like(limits=tuple(map(min, self.limits, caps)))

    def with_mean_costs(self) -> Problem:
        """The same with the mean times for all stages; what they save is their own."""
        stages = self.costs.stages
        names = ("forward", "backward", "weight")
        mean = {name: sum(getattr(stage, name) for stage in stages) / len(stages) for name in names}
        return replace(self, costs=replace(self.costs, stages=tuple(replace(s, **mean) for s in stages)))

    @property
    def is_even(self) -> bool:
        return len(set(self.costs.stages)) == 1

    def excess(self, order: Order) -> float:
        """By how much the order breaks a limit; 0 where it keeps them."""
        if not self.is_limited:
            return 0.0
        most = peaks(self.shop, encode(order, self.microbatches), self.microbatches)
        over = (p - limit for p, limit in zip(most, self.limits, strict=True) if p > limit * (1 + 1e-9))
        return max(over, default=0.0)

    def span(self, order: Order) -> tuple[float, float]:
        """The longest span of a rank, and the makespan."""
        done = run(self.shop, encode(order, self.microbatches), self.microbatches)
        assert done is not None, f"the order of {self.name} cannot progress"
        return done.span, done.makespan

    def fastest(self, orders: Iterable[Order]) -> Order:
        """The shortest span of those that keep the limits; if none does, the one that misses by the least."""
        return min(orders, key=lambda order: (self.excess(order), self.span(order)))

    def fastest_of(self, makers: Sequence[Callable[[Problem], Order]]) -> Order:
        """The order of the maker that does best for a few microbatches, made for all of them.

        Raises the first maker's ScheduleError where all raise one.
        """
        short = self.like(microbatches=min(self.microbatches, _SHORT * self.ranks))
        made, errors = [], list[ScheduleError]()
        for k, make in enumerate(makers):
            try:
                order = make(short)
                made.append((short.excess(order), short.span(order), k))
            except ScheduleError as error:
                errors.append(error)
        for _, _, k in sorted(made):
            try:
                return makers[k](self)
            except ScheduleError as error:
                errors.append(error)
        raise errors[0]


def per_rank(limit: Limit, ranks: int) -> tuple[float, ...]:
    """The limit of each rank; raises ScheduleError for one that is not above 0, or not one for each."""
    if limit is None:
        return (inf,) * ranks
    limits = (limit,) * ranks if isinstance(limit, int | float) else tuple(limit)
    if len(limits) != ranks:
        raise ScheduleError(f"{len(limits)} memory limits given for {ranks} ranks")
    for rank, bound in enumerate(limits):
        if not bound > 0:
            raise ScheduleError(f"the memory limit of rank {rank} is {bound:g}; it must be above 0")
    return limits
