"""A scheduling problem: sizes, costs and memory limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from fxpipe.errors import ScheduleError
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.engine.arrays import OpIds, ScheduleArrays, decode, encode, peaks, run, schedule_arrays
from fxpipe.schedule.ops import Order
from fxpipe.schedule.placement import place

Limit = float | Sequence[float] | None
"""One memory limit for all ranks, one for each rank, or none; in the unit of the costs' memory."""


@dataclass(frozen=True)
class Problem:
    """``costs`` has ``ranks · stages_per_rank`` stages; ``limits`` are per rank, infinite for no limit.

    ``group``: the number of microbatches in a group, for a family with groups; None leaves it to the family.
    """

    name: str
    ranks: int
    microbatches: int
    stages_per_rank: int
    shape: str
    costs: Costs
    limits: tuple[float, ...]
    group: int | None = None

    @cached_property
    def placement(self) -> tuple[int, ...]:
        return place(self.shape, self.ranks, self.stages_per_rank)

    @property
    def is_v(self) -> bool:
        """Whether the placement is a V; with one stage per rank, V and plain placement are the same."""
        return self.shape == "v" and self.stages_per_rank > 1

    @property
    def is_limited(self) -> bool:
        return min(self.limits) < inf

    @property
    def ops(self) -> int:
        """The number of ops: F, B and W of all stages and microbatches."""
        return self.arrays.sections * self.microbatches

    @cached_property
    def arrays(self) -> ScheduleArrays:
        return schedule_arrays(self.costs, self.placement)

    def with_limits(
        self, *, limits: tuple[float, ...] | None = None, microbatches: int | None = None
    ) -> Problem:
        """The same problem with other limits or microbatches."""
        m, limits = microbatches or self.microbatches, self.limits if limits is None else limits
        other = replace(self, limits=limits, microbatches=m)
        other.__dict__["arrays"] = self.arrays  # they depend on neither
        return other

    def capped_to(self, microbatches: float) -> Problem:
        """The same problem with limits of at most so many microbatches' activations."""
        caps = [microbatches * self.arrays.smallest_limit(rank) for rank in range(self.ranks)]
        return self.with_limits(limits=tuple(map(min, self.limits, caps)))

    def with_mean_costs(self) -> Problem:
        """The same problem with the mean times for all stages; memory stays."""
        stages = self.costs.stages
        names = ("forward", "backward", "weight")
        mean = {name: sum(getattr(stage, name) for stage in stages) / len(stages) for name in names}
        return replace(self, costs=replace(self.costs, stages=tuple(replace(s, **mean) for s in stages)))

    @property
    def is_even(self) -> bool:
        return len(set(self.costs.stages)) == 1

    def score(self, op_ids: OpIds) -> tuple[float, float, float]:
        """The most by which an order exceeds a limit, its span, its makespan; compared in this order."""
        arrays, m = self.arrays, self.microbatches
        over = (p - limit for p, limit in zip(peaks(arrays, op_ids, m), self.limits, strict=True))
        excess = max(x if x > 1e-9 * limit else 0.0 for x, limit in zip(over, self.limits, strict=True))
        done = run(arrays, op_ids, m)
        assert done is not None, f"the order of {self.name} cannot progress"
        return excess, done.span, done.makespan

    def fastest(self, orders: Iterable[Order]) -> Order:
        """The order with the shortest span within the limits, else the one that exceeds them least."""
        return min(orders, key=lambda order: self.score(encode(order, self.microbatches)))

    def fastest_of(self, orders: Iterable[OpIds]) -> Order:
        """``fastest`` for orders given as op ids."""
        return decode(self.arrays, min(orders, key=self.score), self.microbatches)


def per_rank(limit: Limit, ranks: int) -> tuple[float, ...]:
    """The limit of each rank.  Raises ScheduleError unless every limit is above 0 and every rank has one."""
    if limit is None:
        return (inf,) * ranks
    limits = (limit,) * ranks if isinstance(limit, int | float) else tuple(limit)
    if len(limits) != ranks:
        raise ScheduleError(
            f"{len(limits)} memory limits for {ranks} ranks: give one for all, or one for each"
        )
    for rank, bound in enumerate(limits):
        if not bound > 0:
            raise ScheduleError(f"the memory limit of rank {rank} is {bound:g}; it must be above 0")
    return limits
