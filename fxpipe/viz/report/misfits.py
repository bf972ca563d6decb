"""The candidates that the memory limit has left out, simulated without it: what more memory would buy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxpipe.errors import ScheduleError
from fxpipe.plan.artifact import Plan
from fxpipe.schedule.candidate_row import Tried
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.offload.planner import FULL, offload
from fxpipe.schedule.ops import Direction
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate


@dataclass(frozen=True)
class Beyond:
    """A candidate without the limit.  ``seconds`` a step.  ``peak_memory``: bytes of activations of the
    fullest rank.  ``more``: bytes that the limit lacks."""

    seconds: float
    peak_memory: float
    more: float


def beyond_limit(plan: Plan) -> dict[int, Beyond]:
    """Candidates that need more memory and would then run, by their places in ``plan.tried``.

    Of the plan's own stages, whose costs are known: families that are not searched, with the placement,
    recomputation and vocabulary stages of the plan, and as large a share to offload.
    """
    if not plan.limits:
        return {}
    return {
        number: found
        for number, tried in enumerate(plan.tried)
        if tried.seconds is None and (found := _simulated(plan, tried)) is not None
    }


def _simulated(plan: Plan, tried: Tried) -> Beyond | None:
    barriers = 0 if plan.vocabulary is None else plan.vocabulary.barriers
    if (tried.recompute, tried.barriers, tried.head_chunks) != (plan.recompute, barriers, plan.head_chunks):
        return None
    family = FAMILIES.get(tried.schedule)
    if family is None or family.is_searched:
        return None
    try:
        schedule = build(
            tried.schedule,
            ranks=plan.ranks,
            microbatches=plan.step.microbatches,
            costs=plan.costs,
            stages_per_rank=tried.stages_per_rank,
            placement=tried.placement,
            vocabulary=plan.vocabulary,
        )
    except ScheduleError:  # it has no order of these stages
        return None
    if tuple(schedule.placement) != tuple(plan.placement):
        return None
    timeline = simulate(schedule, plan.costs)
    if plan.transfers:
        timeline = offload(timeline, _share(plan)).timeline
    lacks = max(peak - limit for peak, limit in zip(timeline.peak_memory, plan.limits, strict=True))
    return Beyond(timeline.seconds, max(timeline.peak_memory), lacks) if lacks > 0 else None


def _share(plan: Plan) -> float:
    """The share of its activations that the plan offloads."""
    asked = offload(simulate(replace(plan.ordered, transfers=()), plan.costs), FULL).asked
    return sum(transfer.direction is Direction.OUT for transfer in plan.transfers) / asked
