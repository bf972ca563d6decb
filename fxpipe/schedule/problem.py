"""A scheduling problem: the stages of a step on ranks, their costs, the memory limits, the objective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from fxpipe.errors import ScheduleError, number_of
from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.costs import TIMES, Costs
from fxpipe.schedule.engine.arrays import ScheduleArrays, least_period, schedule_arrays
from fxpipe.schedule.engine.kernel import TIE_BREAK, score
from fxpipe.schedule.engine.order import Order, OrderTimes
from fxpipe.schedule.memory_text import ANY_UNIT, MemoryText
from fxpipe.schedule.offload.planner import Share
from fxpipe.schedule.ops import Objective, RankOps, Schedule
from fxpipe.schedule.parts import Parts, joined_costs, placement_of_parts
from fxpipe.schedule.placement import place
from fxpipe.schedule.stages import Vocabulary
from fxpipe.schedule.vocabulary_costs import budget_for_model_stages, some_stages

Limit = float | Sequence[float] | None
"""One memory limit for all ranks, one for each rank, or none; in the unit of the costs' memory."""


class Setting(NamedTuple):
    """The decisions by which the problems of a step differ.  ``barriers``: a microbatch, 0 if vocabulary
    layers are not split.  ``recompute``: the level.  ``head_chunks``: the parts of the output layer.
    ``parts``: the most parts of a stage."""

    stages_per_rank: int
    placement: str
    barriers: int
    recompute: str
    head_chunks: int = 1
    parts: int = 1


@dataclass(frozen=True, eq=False)
class Problem:
    """Stages on ranks, their costs there, and the memory for activations.

    ``stages_per_rank`` are the model's own, in the placement called ``shape``; with ``vocabulary`` the costs
    are of its stages as well.
    """

    ranks: int
    microbatches: int
    stages_per_rank: int
    shape: str
    costs: Costs
    limits: tuple[float, ...]
    """Those of each rank, infinite for no limit."""
    vocabulary: Vocabulary | None = None
    offload: Share = None
    """The share to offload over the costs' link."""
    slack: float = 1.0
    """How many times the limits an order may take before it is offloaded."""
    recompute: str = ""
    """The level of recomputation in the costs."""
    objective: Objective = "makespan"
    group: int | None = None
    """The number of microbatches in a group, for a family with groups; None leaves it to the family."""
    text: MemoryText = ANY_UNIT
    """The units of messages about memory."""
    head_chunks: int = 1
    """The parts of the output layer in the costs."""
    parts: Parts = ()
    """Those of each of the model's stages, where the costs are those of parts."""

    @property
    def setting(self) -> Setting:
        barriers = 0 if self.vocabulary is None else self.vocabulary.barriers
        parts = max(self.parts, default=1)
        return Setting(self.stages_per_rank, self.shape, barriers, self.recompute, self.head_chunks, parts)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage, vocabulary stages included."""
        model_stages = place(self.shape, self.ranks, self.stages_per_rank)
        if self.parts:
            model_stages = placement_of_parts(model_stages, self.parts)
        return model_stages if self.vocabulary is None else self.vocabulary.placement(model_stages)

    @property
    def is_v(self) -> bool:
        """Whether the placement is a V; with one stage per rank, V and plain placement are the same."""
        return self.shape == "v" and self.stages_per_rank > 1

    @property
    def is_limited(self) -> bool:
        return min(self.limits) < inf

    @property
    def is_extended(self) -> bool:
        """Whether vocabulary stages or transfers are added to an order of the model's stages."""
        return self.vocabulary is not None or self.offload is not None

    @cached_property
    def model(self) -> Problem:
        """The problem of the model's own stages: without vocabulary stages, with the memory that they leave,
        and without offload."""
        if not self.is_extended:
            return self
        costs, limits = self.costs, tuple(self.slack * limit for limit in self.limits)
        if self.vocabulary is not None:
            limits = budget_for_model_stages(costs, self.vocabulary, limits)
            end = len(costs.stages) - self.vocabulary.output_shards
            costs = some_stages(costs, self.vocabulary.embedding_shards, end)
        return replace(self, costs=costs, limits=limits, vocabulary=None, offload=None, slack=1.0)

    @cached_property
    def joined(self) -> Problem:
        """The problem of the model's stages whose parts have these costs."""
        return replace(self, costs=joined_costs(self.costs, self.parts), parts=())

    @cached_property
    def arrays(self) -> ScheduleArrays:
        return schedule_arrays(
            self.costs,
            self.placement,
            self.microbatches,
            updates=self.objective == "period",
            exchanges=self.by_makespan,
        )

    @property
    def ops(self) -> int:
        """The number of ops: F, B and W of all stages and microbatches."""
        return self.arrays.sections * self.microbatches

    @property
    def work(self) -> float:
        """Seconds of the busiest rank, with its update if the objective has that."""
        arrays, m = self.arrays, self.microbatches
        return max(m * arrays.work(rank) + update for rank, update in enumerate(arrays.update))

    @cached_property
    def bound(self) -> float:
        """A lower bound on the objective of an order, whatever is offloaded."""
        bounds = [self.work]
        if self.by_makespan:
            bounds.append(lower_bound(self.costs, self.placement, self.microbatches))
        if not self.is_extended:
            bounds.append(self.microbatches * self.least_period)
        return max(bounds)

    @cached_property
    def least_period(self) -> float:
        """A lower bound on the mean time from microbatch to microbatch within the limits."""
        return least_period(self.arrays, self.costs, self.limits)

    def limited(self, limits: tuple[float, ...]) -> Problem:
        other = replace(self, limits=limits)
        other.__dict__["arrays"] = self.arrays  # they do not depend on the limits
        return other

    def capped_to(self, microbatches: float) -> Problem:
        """This problem with limits of at most so many microbatches' activations."""
        caps = (microbatches * least for least in self.arrays.smallest_limits)
        return self.limited(tuple(map(min, self.limits, caps)))

    def with_mean_costs(self) -> Problem:
        """This problem with the mean times for all stages; memory stays."""
        stages = self.costs.stages
        mean = {name: sum(getattr(stage, name) for stage in stages) / len(stages) for name in TIMES.values()}
        return replace(self, costs=replace(self.costs, stages=tuple(replace(s, **mean) for s in stages)))

    def order(self, ops: RankOps) -> Order:
        return Order.of(self.arrays, ops)

    def schedule(self, name: str, ops: RankOps) -> Schedule:
        return Schedule(name, self.placement, self.microbatches, ops, self.vocabulary)

    def time(self, done: OrderTimes) -> float:
        """The objective; of the period a lower bound, if spans are the same in later steps."""
        return done.makespan if self.by_makespan else done.span

    def time_of(self, order: Order) -> float:
        """The objective of an order that was made with other costs."""
        done = replace(order, arrays=self.arrays).run()
        assert done is not None, "costs do not decide whether an order can progress"
        return self.time(done)

    def value(self, done: OrderTimes) -> float:
        """The objective, and at most 0.1% more that tells equals apart."""
        return float(score(done.first, done.free, self.by_makespan))

    @property
    def by_makespan(self) -> bool:
        return self.objective == "makespan"

    @property
    def good_enough(self) -> float:
        """A search ends when the value is at most this."""
        # A value is the objective and a tie break of at most so much of it.
        return self.bound * (1 + TIE_BREAK) * (1 + 1e-9)

    def excess_and_times(self, order: Order) -> tuple[float, float, float]:
        """The most by which an order exceeds a limit, its span, its makespan; compared in this order."""
        over = (peak - limit for peak, limit in zip(order.peaks(), self.limits, strict=True))
        excess = max(x if x > 1e-9 * limit else 0.0 for x, limit in zip(over, self.limits, strict=True))
        done = order.run()
        assert done is not None, "an order that is built can progress"
        return excess, done.span, done.makespan

    def fastest(self, orders: Iterable[Order]) -> Order:
        """The order with the shortest span within the limits, else the one that exceeds them least."""
        return min(orders, key=self.excess_and_times)


def per_rank(limit: Limit, ranks: int) -> tuple[float, ...]:
    """The limit of each rank.  Raises ScheduleError unless every limit is above 0 and every rank has one."""
    if limit is None:
        return (inf,) * ranks
    limits = (limit,) * ranks if isinstance(limit, int | float) else tuple(limit)
    if len(limits) != ranks:
        raise ScheduleError(
            f"{number_of(len(limits), 'memory limit')} for {number_of(ranks, 'rank')}: give "
            "one for all, or one for each"
        )
    for rank, bound in enumerate(limits):
        if not bound > 0:
            raise ScheduleError(f"the memory limit of rank {rank} is {bound:g}; it must be above 0")
    return limits
