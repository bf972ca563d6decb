"""The schedule of a named family."""

from __future__ import annotations

from fxpipe.errors import ScheduleError
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.engine.arrays import decode
from fxpipe.schedule.families.registry import FAMILIES, Family, check_least, order_of
from fxpipe.schedule.ops import Order, Schedule
from fxpipe.schedule.placement import place
from fxpipe.schedule.problem import Limit, Problem, per_rank
from fxpipe.schedule.search.pool import find
from fxpipe.schedule.search.vocabulary_passes import weave
from fxpipe.schedule.stages import Vocabulary
from fxpipe.schedule.vocabulary_costs import budget_for_model_stages, model_stage_costs


def build(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    costs: Costs,
    stages_per_rank: int | None = None,
    placement: str | None = None,
    memory_limit: Limit = None,
    group: int | None = None,
    effort: float | None = None,
    seed: int = 0,
    vocabulary: Vocabulary | None = None,
) -> Schedule:
    """The schedule of a named family, for any numbers of ranks and microbatches from 1.

    stages_per_rank, placement: ``"plain"`` (stage s on rank s mod p) or ``"v"`` (0 … p-1, then back); the
        family has defaults for both.
    memory_limit: one for all ranks or one for each, in the unit of the costs' memory.
    group: the group size of ``gis``.
    effort, seed: for the families that search, about the seconds of one core, and the seed of the random
        numbers.
    vocabulary: the costs include those of vocabulary stages, which are woven into the family's schedule.

    On every stage the ops of a kind run in microbatch order.  With uneven costs the order of a family that
    does not search is never slower than its order for the mean costs.

    Raises ScheduleError for an unknown name (listing the known ones), numbers below 1, stages per rank or a
    placement that the family does not support, and a limit that it cannot keep (naming the smallest).
    """
    if name not in FAMILIES:
        raise ScheduleError(f"unknown schedule {name!r}; known: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    whole, given = costs, per_rank(memory_limit, max(1, ranks))
    if vocabulary is not None:
        costs, memory_limit = (
            model_stage_costs(costs, vocabulary),
            budget_for_model_stages(costs, vocabulary, given),
        )
    chunks = family.stages_per_rank if stages_per_rank is None else stages_per_rank
    numbers = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": chunks}
    for what, number in numbers.items():
        if number < 1:
            raise ScheduleError(f"schedule {name}: {what} is {number}; it must be at least 1")
    shape = family.placement if placement is None else placement
    rank_of_stage = place(shape, ranks, chunks)
    _check_family(family, chunks, shape)
    if len(costs.stages) != len(rank_of_stage):
        raise ScheduleError(
            f"schedule {name}: {ranks} ranks of {chunks} stages each need the costs of "
            f"{len(rank_of_stage)} stages, not {len(costs.stages)}"
        )
    limits = per_rank(memory_limit, ranks)
    problem = Problem(name, ranks, microbatches, chunks, shape, costs, limits, group)
    order = _searched(family, problem, effort, seed) if family.is_searched else order_of(family, problem)
    if vocabulary is not None:
        order = weave(problem, order, whole, vocabulary, given)
        rank_of_stage = vocabulary.placement(rank_of_stage)
    return Schedule(name, rank_of_stage, microbatches, order, vocabulary)


def _searched(family: Family, problem: Problem, effort: float | None, seed: int) -> Order:
    """The fastest of the published orders for the placement and the orders that the search finds."""
    check_least(family, problem)
    (best,) = find([family.limited(problem)], "span", effort, seed)
    assert best is not None, "find raises if nothing fits"
    return decode(problem.arrays, best.order, problem.microbatches)


def _check_family(family: Family, chunks: int, shape: str) -> None:
    if chunks not in family.chunks:
        has = f"{family.chunks[0]}" if len(family.chunks) == 1 else f"at least {family.chunks[0]}"
        raise ScheduleError(f"schedule {family.name} has {has} stages per rank, not {chunks}")
    if not family.has(chunks, shape):
        raise ScheduleError(f"schedule {family.name} has {family.placement} placement, not {shape}")
