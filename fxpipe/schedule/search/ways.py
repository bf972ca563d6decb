"""The ways to schedule a setting: within its memory limits, or beyond them with offload; and their bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.engine.arrays import encode, run, schedule_arrays
from fxpipe.schedule.families.registry import FAMILIES, Family
from fxpipe.schedule.offload.planner import AUTO, Share
from fxpipe.schedule.ops import Order
from fxpipe.schedule.problem import Limit, Problem, per_rank
from fxpipe.schedule.search.due_dates import least_period
from fxpipe.schedule.search.goal import Objective
from fxpipe.schedule.stages import Vocabulary
from fxpipe.schedule.vocabulary_costs import budget_for_model_stages, model_stage_costs

SEARCHED = "zb"
"""The family that is searched in place of all searched families: the others are cases of it."""

BEYOND = tuple(f for f in FAMILIES.values() if f.name == SEARCHED or not f.is_searched)
WITHIN = tuple(f for f in BEYOND if not f.for_offload)


@dataclass(frozen=True, eq=False)
class Setting:
    """Stages on ranks, their costs there, and the memory for activations (``limits``).

    ``stages_per_rank`` are the model's own; with ``vocabulary`` the costs are of its stages as well.
    ``offload``: the share to offload over the costs' link.  ``recompute``: the level of recomputation in the
    costs.
    """

    stages_per_rank: int
    placement: str
    costs: Costs
    limits: Limit = None
    vocabulary: Vocabulary | None = None
    offload: Share = None
    recompute: str = ""


@dataclass(frozen=True, eq=False)
class Way:
    """A setting with the problem of its model's own stages, and the share to offload afterwards."""

    setting: Setting
    problem: Problem
    limits: tuple[float, ...]
    offload: Share
    candidates: tuple[Family, ...]

    @property
    def families(self) -> tuple[Family, ...]:
        """The candidates that have the setting's stages and placement."""
        shape = self.setting.stages_per_rank, self.setting.placement
        return tuple(family for family in self.candidates if family.has(*shape))

    @property
    def limits_without_offload(self) -> tuple[float, ...]:
        """The limits of an order to which transfers are added afterwards, if any are."""
        return self.limits if self.offload is None else (inf,) * self.problem.ranks

    @property
    def offloads_to_fit(self) -> bool:
        """Does an order depend on transfers to keep the limits?"""
        return self.offload is not None and min(self.limits) < inf

    @property
    def is_extended(self) -> bool:
        """Are vocabulary stages or transfers added to an order of the model's stages?"""
        return self.setting.vocabulary is not None or self.offload is not None

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage, vocabulary stages included."""
        own, vocabulary = self.problem.placement, self.setting.vocabulary
        return own if vocabulary is None else vocabulary.placement(own)

    @cached_property
    def work(self) -> float:
        """Seconds of the busiest rank, vocabulary stages included."""
        return self.problem.microbatches * schedule_arrays(self.setting.costs, self.placement).period

    def bound(self, objective: Objective) -> float:
        """No schedule takes less, vocabulary stages included, whatever it offloads."""
        m, bounds = self.problem.microbatches, [self.work]
        if objective == "makespan":
            bounds.append(lower_bound(self.setting.costs, self.placement, m))
        if not self.is_extended:
            bounds.append(m * least_period(self.problem))
        return max(bounds)

    def least(self, order: Order, objective: Objective) -> float:
        """An estimate from below of the order's seconds when it is extended.

        No bound: where vocabulary stages are added, list scheduling may change the order.
        """
        m = self.problem.microbatches
        done = run(self.problem.arrays, encode(order, m), m)
        if done is None:  # the arrays need the stages of a rank in the model's order, which the costs do not
            return self.work
        return max(self.work, done.makespan if objective == "makespan" else done.span)


def ways_of(setting: Setting, ranks: int, microbatches: int, limit: Limit) -> list[Way]:
    """The ways to keep the limits: without offload, or beyond them with as much offload as needed."""
    limits, free = limits_of(setting, limit, ranks), (inf,) * ranks

    def way(allowed: tuple[float, ...], share: Share, families: tuple[Family, ...]) -> Way:
        problem = _problem(setting, ranks, microbatches, allowed)
        return Way(setting, problem, limits, share, families)

    if setting.offload is None or (setting.offload == AUTO and limits == free):
        return [way(limits, None, WITHIN)]
    beyond = way(free, setting.offload, BEYOND)
    if setting.offload != AUTO:
        return [beyond]
    twice = way(tuple(2 * x for x in limits), AUTO, (FAMILIES[SEARCHED],))
    return [way(limits, None, WITHIN), beyond, twice]


def _problem(setting: Setting, ranks: int, microbatches: int, limits: tuple[float, ...]) -> Problem:
    """The problem of the model's own stages: without vocabulary stages, and with the memory they leave."""
    costs = setting.costs
    if setting.vocabulary is not None:
        limits = budget_for_model_stages(costs, setting.vocabulary, limits)
        costs = model_stage_costs(costs, setting.vocabulary)
    v, shape = setting.stages_per_rank, setting.placement
    return Problem(SEARCHED, ranks, microbatches, v, shape, costs, limits)


def limits_of(setting: Setting, limit: Limit, ranks: int) -> tuple[float, ...]:
    return tuple(map(min, per_rank(limit, ranks), per_rank(setting.limits, ranks)))
