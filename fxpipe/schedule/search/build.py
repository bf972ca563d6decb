"""The schedule of a named family."""

from __future__ import annotations

from dataclasses import replace

from fxpipe.errors import ScheduleError, number_of, suggested
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.families.registry import FAMILIES, Family, check_least, order_of
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.problem import Limit, Problem, per_rank
from fxpipe.schedule.search.less_memory import with_less_memory
from fxpipe.schedule.search.pool import anneal_each, find
from fxpipe.schedule.search.vocabulary_passes import best_of, insertions, ops_of
from fxpipe.schedule.stages import Vocabulary


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
    vocabulary: the costs include those of vocabulary stages, which are inserted into the family's schedule.

    On every stage the ops of a kind run in microbatch order.  With uneven costs the order of a family that
    does not search is never slower than its order for the mean costs.

    Raises ScheduleError for an unknown name (listing the known ones), numbers below 1, stages per rank or a
    placement that the family does not support, and a limit that it cannot keep (naming the smallest).
    """
    family = family_called(name)
    problem = Problem(
        ranks,
        microbatches,
        family.stages_per_rank if stages_per_rank is None else stages_per_rank,
        family.placement if placement is None else placement,
        costs,
        per_rank(memory_limit, max(1, ranks)),
        vocabulary,
        group=group,
    )
    return schedule_of(name, problem, effort, seed)


def schedule_of(name: str, problem: Problem, effort: float | None = None, seed: int = 0) -> Schedule:
    """The schedule of a named family for a problem, before offload; as ``build``.

    A search is for the shortest span, unless the problem's objective is the period.
    """
    family = family_called(name)
    if problem.objective != "period":
        problem = replace(problem, objective="span")
    _check_family(family, problem)
    model = problem.model
    if family.is_searched:
        # The fastest of the published orders for the placement and the orders that the search finds.
        check_least(name, model)
        (best,) = find([family.limited(model)], effort, seed)
        assert best is not None, "find raises if nothing fits"
        order = with_less_memory(best, seed).order
    else:
        order = order_of(family, model)
    ops = order.ops
    if problem.vocabulary is not None:
        ops = ops_of(with_less_memory(best_of(anneal_each(insertions(problem, name, order))), seed))
    return problem.schedule(name, ops)


def family_called(name: str) -> Family:
    """The family of a name.  Raises ScheduleError, listing the known ones, for an unknown name."""
    if name not in FAMILIES:
        raise ScheduleError(
            f"unknown schedule {name!r}.{suggested(name, FAMILIES)} Known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def _check_family(family: Family, problem: Problem) -> None:
    name, chunks = family.name, problem.stages_per_rank
    numbers = {"ranks": problem.ranks, "microbatches": problem.microbatches, "stages_per_rank": chunks}
    for what, number in numbers.items():
        if number < 1:
            raise ScheduleError(f"schedule {name}: {what} is {number}; it must be at least 1")
    stages = len(problem.model.placement)
    possible = family.chunks_in(problem.shape)
    if not possible:
        raise ScheduleError(f"schedule {name} has {family.placement} placement, not {problem.shape}")
    if chunks not in possible:
        has = f"at least {possible[0]}" if isinstance(possible, range) else " or ".join(map(str, possible))
        raise ScheduleError(
            f"schedule {name} has {has} stages per rank in {problem.shape} placement, not {chunks}"
        )
    described = len(problem.model.costs.stages)
    if described != stages:
        raise ScheduleError(
            f"schedule {name}: {number_of(problem.ranks, 'rank')} of {number_of(chunks, 'stage')} each need "
            f"the costs of {number_of(stages, 'stage')}, not {described}"
        )
