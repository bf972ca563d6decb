"""The named schedules: a registry of functions from a problem to an order.

M_B is the memory of one microbatch's saved activations on one rank, in all its chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf

from fxpipe.errors import ScheduleError
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.engine.arrays import decode, encode, peaks
from fxpipe.schedule.families import fb_orders
from fxpipe.schedule.families.staggered import staggered
from fxpipe.schedule.families.weights import delay_weights
from fxpipe.schedule.ops import OpKind, Order, Schedule
from fxpipe.schedule.placement import place
from fxpipe.schedule.problem import Limit, Problem, per_rank
from fxpipe.schedule.search.pool import find
from fxpipe.schedule.search.starts import gis as gis_orders
from fxpipe.schedule.search.starts import groups, starts
from fxpipe.schedule.search.starts import zb_v as zb_v_orders
from fxpipe.schedule.search.vocabulary_passes import budget_for_model_stages, model_stage_costs, weave
from fxpipe.schedule.stages import Vocabulary


@dataclass(frozen=True)
class Family:
    """A named way to build a schedule.

    ``chunks`` and ``shapes``: the stages per rank and the placements that it supports; the first of each is
    the default.  ``is_searched``: it searches for an order within the memory limit.  ``for_offload``: it has
    no advantage unless activations are offloaded.
    """

    name: str
    function: Callable[[Problem], Order]
    summary: str
    chunks: tuple[int, ...] | range = range(1, 1024)
    shapes: tuple[str, ...] = ("plain", "v")
    is_searched: bool = False
    for_offload: bool = False

    @property
    def stages_per_rank(self) -> int:
        return self.chunks[0]

    @property
    def placement(self) -> str:
        return self.shapes[0]

    def has(self, stages_per_rank: int, placement: str) -> bool:
        return stages_per_rank in self.chunks and (stages_per_rank == 1 or placement in self.shapes)


def gpipe(problem: Problem) -> Order:
    return fb_orders.breadth_first(problem.placement, problem.microbatches, OpKind.BW)


def one_f_one_b(problem: Problem) -> Order:
    if problem.is_v:
        return _v_fb_order(problem, OpKind.BW)
    p, v = problem.ranks, problem.stages_per_rank
    in_flight = [p - rank if v == 1 else p * (v - 1) + 2 * (p - rank) - 1 for rank in range(p)]
    return fb_orders.interleaved(problem.placement, problem.microbatches, OpKind.BW, in_flight.__getitem__)


def gis(problem: Problem) -> Order:
    """With split backward; by default the best group size from p/2 to p whose order fits memory."""
    p = problem.ranks
    if problem.group is not None:
        least = ceil(p / 2)
        if not least <= problem.group <= p:
            raise ScheduleError(
                f"schedule {problem.name} on {p} ranks has groups of {least} to {p} microbatches, "
                f"not {problem.group}"
            )
    sizes = groups(p) if problem.group is None else [problem.group]
    return problem.fastest_of(op_ids for group in sizes for op_ids in gis_orders(group, problem))


def zb_h1(problem: Problem) -> Order:
    """Plain placement: rank r runs at most p·v - r forwards ahead of its B, and W r ops of B later, so that
    every rank holds p·v chunks.  V placement: W ops fill the bubbles that the costs leave.
    """
    if problem.is_v:
        _check_two_in_v(problem)
        return problem.fastest_of(zb_v_orders(problem))
    p, v = problem.ranks, problem.stages_per_rank
    return delay_weights(
        fb_orders.interleaved(problem.placement, problem.microbatches, OpKind.B, lambda rank: p * v - rank),
        lambda rank: rank,
    )


def zb_h2(problem: Problem) -> Order:
    """Rank r runs at most 2(p - r) - 1 forwards ahead of its B, and W 2r ops of B later: 2p - 1 M_B on every
    rank."""
    p = problem.ranks
    fb_order = fb_orders.interleaved(
        problem.placement, problem.microbatches, OpKind.B, lambda rank: 2 * (p - rank) - 1
    )
    return delay_weights(fb_order, lambda rank: 2 * rank)


def zb_v(problem: Problem) -> Order:
    return zb(problem.capped_to(problem.ranks))


def zb(problem: Problem) -> Order:
    """The fastest of the published orders for the placement and the orders that the search finds."""
    (best,) = find([problem], starts, "span", problem.effort, problem.seed)
    assert best is not None, "find raises if nothing fits"
    return decode(problem.arrays, best.order, problem.microbatches)


def zb_1p(problem: Problem) -> Order:
    return zb(problem.capped_to(problem.ranks))


def zb_2p(problem: Problem) -> Order:
    return zb(problem.capped_to(2 * problem.ranks))


def v_half(problem: Problem) -> Order:
    """The search under the problem's limit, by default ⌊(p + 2) / 2⌋ M_B, about half of 1F1B's peak."""
    return zb(problem if problem.is_limited else problem.capped_to((problem.ranks + 2) // 2))


def v_min(problem: Problem) -> Order:
    """The search under the problem's limit, by default ⌊(p + 4) / 3⌋ M_B, about a third of 1F1B's peak."""
    return zb(problem if problem.is_limited else problem.capped_to((problem.ranks + 4) // 3))


def dual_pipe_v(problem: Problem) -> Order:
    return fb_orders.dual_pipe_v(problem.ranks, problem.microbatches)


def _v_fb_order(problem: Problem, backward: OpKind) -> Order:
    _check_two_in_v(problem)
    return fb_orders.zero_bubble_v(problem.ranks, problem.microbatches, backward)


def _check_two_in_v(problem: Problem) -> None:
    if problem.stages_per_rank != 2:
        raise ScheduleError(
            f"schedule {problem.name} in V placement has 2 stages per rank, not {problem.stages_per_rank}"
        )


_CHUNKS = range(2, 1024)
_TWO_IN_V = ((2,), ("v",))

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("gpipe", gpipe, "all forwards, then all backwards (1811.06965): peak memory m · M_B"),
        Family("1f1b", one_f_one_b, "one forward, one backward (2104.04473): at most p · M_B"),
        Family("interleaved", one_f_one_b, "1F1B over chunks (2104.04473)", _CHUNKS, ("plain",)),
        Family("gis", gis, "interleaved, short warm-up, small groups (2503.01328)", _CHUNKS, ("plain",)),
        Family(
            "staggered",
            staggered,
            "interleaved, microbatches one after the other, for offload of one half (after 2503.01328)",
            _CHUNKS,
            ("plain",),
            for_offload=True,
        ),
        Family("zb-h1", zb_h1, "backward split, W delayed (2401.10241): at most p · M_B"),
        Family("zb-h2", zb_h2, "W delayed further, to 2p - 1 M_B (2401.10241)", (1,)),
        Family("zb", zb, "searched under any memory limit (after 2401.10241)", is_searched=True),
        Family("zb-1p", zb_1p, "zb under p · M_B", is_searched=True),
        Family("zb-2p", zb_2p, "zb under 2p · M_B", is_searched=True),
        Family("zb-v", zb_v, "V placement, at most p · M_B (2401.10241)", *_TWO_IN_V, is_searched=True),
        Family("v-half", v_half, "V placement, about p/2 · M_B (2405.15362)", *_TWO_IN_V, is_searched=True),
        Family("v-min", v_min, "V placement, about p/3 · M_B (2405.15362)", *_TWO_IN_V, is_searched=True),
        Family("1f1b-v", one_f_one_b, "ZB-V's order, B and W as one (2405.15362)", *_TWO_IN_V),
        Family("dualpipe-v", dual_pipe_v, "DualPipeV without overlap, one model copy", *_TWO_IN_V),
    )
}


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
    problem = Problem(name, ranks, microbatches, chunks, shape, costs, limits, group, effort, seed)
    order = order_of(family, problem)
    if vocabulary is not None:
        order = weave(problem, order, whole, vocabulary, given)
        rank_of_stage = vocabulary.placement(rank_of_stage)
    return Schedule(name, rank_of_stage, microbatches, order, vocabulary)


def order_of(family: Family, problem: Problem) -> Order:
    """The family's order; with uneven costs, if it is faster, that for the mean costs of all stages.

    Raises ScheduleError for a limit that the family cannot keep.
    """
    _check_least(family, problem)
    orders = [family.function(problem)]
    if not problem.is_even and not family.is_searched:
        orders += _for_mean(family, problem)
    order = problem.fastest(dict.fromkeys(orders)) if len(orders) > 1 else orders[0]
    _check_memory(family, problem, order)
    return order


def _for_mean(family: Family, problem: Problem) -> tuple[Order, ...]:
    """The family's order for the mean costs of all stages; empty if it has none under the limit."""
    try:
        return (family.function(problem.with_mean_costs()),)
    except ScheduleError:
        return ()


def _check_family(family: Family, chunks: int, shape: str) -> None:
    if chunks not in family.chunks:
        has = f"{family.chunks[0]}" if len(family.chunks) == 1 else f"at least {family.chunks[0]}"
        raise ScheduleError(f"schedule {family.name} has {has} stages per rank, not {chunks}")
    if not family.has(chunks, shape):
        raise ScheduleError(f"schedule {family.name} has {family.placement} placement, not {shape}")


def _check_least(family: Family, problem: Problem) -> None:
    """Raise ScheduleError if one microbatch alone exceeds a rank's limit: then no family can keep it."""
    needed = [problem.arrays.smallest_limit(rank) for rank in range(problem.ranks)]
    for rank, (least, limit) in enumerate(zip(needed, problem.limits, strict=True)):
        if least > limit * (1 + 1e-9):
            raise ScheduleError(
                f"schedule {family.name}: one microbatch needs {least:g} of memory on rank {rank}, and the "
                f"limit is {limit:g}; the smallest limit that any schedule can keep is {max(needed):g}"
            )


def _check_memory(family: Family, problem: Problem, order: Order) -> None:
    if not problem.is_limited:
        return
    peak = peaks(problem.arrays, encode(order, problem.microbatches), problem.microbatches)
    for rank, (most, limit) in enumerate(zip(peak, problem.limits, strict=True)):
        if limit < inf and most > limit * (1 + 1e-9):
            raise ScheduleError(
                f"schedule {family.name} needs {most:g} of memory on rank {rank}, and the limit is "
                f"{limit:g}; the smallest limit that it can keep is {max(peak):g}"
            )
