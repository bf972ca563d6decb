"""The named schedules: functions from a problem to an order, and memory limits for the search.

M_B is the memory of one microbatch's saved activations on one rank, in all its chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil

from fxpipe.errors import LimitError, ScheduleError
from fxpipe.schedule.engine.order import Order
from fxpipe.schedule.families import fb_orders
from fxpipe.schedule.families.staggered import staggered
from fxpipe.schedule.families.starts import gis as gis_orders
from fxpipe.schedule.families.starts import groups, most_of_1f1b
from fxpipe.schedule.families.starts import zb_v as zb_v_orders
from fxpipe.schedule.families.weights import delay_weights
from fxpipe.schedule.ops import OpKind, RankOps
from fxpipe.schedule.parts import ops_of_parts
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.simulation.memory import rank_over


@dataclass(frozen=True)
class Family:
    """A named schedule: built by ``function``, or searched under a memory limit.

    ``chunks`` and ``in_v``: the stages per rank that it has in plain placement, and in V placement; the first
    is the default.
    """

    name: str
    function: Callable[[Problem], RankOps] | None
    summary: str
    chunks: tuple[int, ...] | range = range(1, 1024)
    in_v: tuple[int, ...] | None = None
    """None: as many as in plain placement."""
    limit: Callable[[int], float] | None = None
    """The limit of the search, in M_B, given the number of ranks."""
    default_limit: Callable[[int], float] | None = None
    """The same, where the problem has no limit."""
    for_offload: bool = False
    """Whether it has no advantage unless activations are offloaded."""
    joins: bool = False
    """Whether all its B and W are one op, and nothing is held between them."""
    by_stage: bool = False
    """Whether it runs all microbatches on one stage after the other: parts can be its stages on one rank."""
    most: Callable[[Problem, int], float] | None = None
    """What a rank (the second argument) holds at most, in activations of one stage and microbatch; None for a
    family that is searched."""

    def __post_init__(self) -> None:
        if (self.function is None) != (self.most is None):
            raise TypeError(f"{self.name}: a family with a function, and no other, says what is its most=")

    @property
    def is_searched(self) -> bool:
        return self.function is None

    @property
    def stages_per_rank(self) -> int:
        return self.chunks_in(self.placement)[0]

    @property
    def placement(self) -> str:
        return "plain" if self.chunks else "v"

    def limited(self, problem: Problem) -> Problem:
        """The problem under the limit of the family."""
        limit = self.limit or (None if problem.is_limited else self.default_limit)
        return problem if limit is None else problem.capped_to(limit(problem.ranks))

    def chunks_in(self, placement: str) -> tuple[int, ...] | range:
        """The stages per rank that it has in a placement."""
        return self.chunks if placement == "plain" or self.in_v is None else self.in_v


def gpipe(problem: Problem) -> RankOps:
    """Run on one rank alone, which has no bubble, in the largest groups of microbatches that keep the limit,
    one after the other: each group gathers parameters once that replicas divide."""
    m = problem.microbatches

    def in_groups(size: int) -> RankOps:
        return fb_orders.breadth_first(problem.placement, m, OpKind.BW, size)

    fits, too_large = 1, m + 1
    size = m
    while problem.ranks == 1 and problem.is_limited and too_large - fits > 1:
        if problem.order(in_groups(size)).fits(problem.limits):
            fits = size
        else:
            too_large = size
        size = (fits + too_large) // 2
    return in_groups(size)


def one_f_one_b(problem: Problem) -> RankOps:
    if problem.is_v:
        return fb_orders.zero_bubble_v(problem.ranks, problem.microbatches, OpKind.BW)
    most = partial(most_of_1f1b, problem)
    return fb_orders.interleaved(problem.placement, problem.microbatches, OpKind.BW, most)


def gis(problem: Problem) -> RankOps:
    """GIS has a split backward, by default in the best groups of p/2 to p whose order fits memory."""
    p = problem.ranks
    if problem.group is not None:
        least = ceil(p / 2)
        if not least <= problem.group <= p:
            raise ScheduleError(
                f"on {p} ranks it has groups of {least} to {p} microbatches, not {problem.group}"
            )
    sizes = groups(p) if problem.group is None else [problem.group]
    return problem.fastest(order for group in sizes for order in gis_orders(group, problem)).ops


def zb_h1(problem: Problem) -> RankOps:
    """Plain placement: rank r runs at most p·v - r forwards ahead of its B, and W r ops of B later, so that
    every rank holds p·v chunks.  V placement: W ops fill the bubbles that the costs leave.
    """
    if problem.is_v:
        return problem.fastest(zb_v_orders(problem)).ops
    p, v = problem.ranks, problem.stages_per_rank
    return delay_weights(
        fb_orders.interleaved(problem.placement, problem.microbatches, OpKind.B, lambda rank: p * v - rank),
        lambda rank: rank,
    )


def zb_h2(problem: Problem) -> RankOps:
    """Rank r runs at most 2(p - r) - 1 forwards ahead of its B, and W 2r ops of B later: 2p - 1 M_B on every
    rank."""
    p = problem.ranks
    fb_order = fb_orders.interleaved(
        problem.placement, problem.microbatches, OpKind.B, lambda rank: 2 * (p - rank) - 1
    )
    return delay_weights(fb_order, lambda rank: 2 * rank)


def dual_pipe_v(problem: Problem) -> RankOps:
    return fb_orders.dual_pipe_v(problem.ranks, problem.microbatches)


def _p_microbatches(problem: Problem, rank: int) -> int:
    return problem.ranks * problem.stages_per_rank


def _all_microbatches(problem: Problem, rank: int) -> int:
    return problem.microbatches * problem.stages_per_rank


_CHUNKS = (range(2, 1024), ())
_TWO_IN_V = ((), (2,))

SEARCHED = "zb"
"""The family that ``auto`` searches in place of all searched families: the others are cases of it."""

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "gpipe",
            gpipe,
            "all forwards, then all backwards (1811.06965): peak memory m · M_B",
            joins=True,
            by_stage=True,
            most=_all_microbatches,
        ),
        Family(
            "1f1b",
            one_f_one_b,
            "one forward, one backward (2104.04473): at most p · M_B",
            in_v=(1, 2),
            joins=True,
            most=most_of_1f1b,
        ),
        Family(
            "interleaved",
            one_f_one_b,
            "1F1B over chunks (2104.04473)",
            *_CHUNKS,
            joins=True,
            most=most_of_1f1b,
        ),
        Family(
            "gis",
            gis,
            "interleaved, short warm-up, small groups (2503.01328)",
            *_CHUNKS,
            most=_p_microbatches,
        ),
        Family(
            "staggered",
            staggered,
            "interleaved, microbatches one after the other, for offload of one half (after 2503.01328)",
            *_CHUNKS,
            for_offload=True,
            most=_all_microbatches,
        ),
        Family(
            "zb-h1",
            zb_h1,
            "backward split, W delayed (2401.10241): at most p · M_B",
            in_v=(1, 2),
            most=_p_microbatches,
        ),
        Family(
            "zb-h2",
            zb_h2,
            "W delayed further, to 2p - 1 M_B (2401.10241)",
            (1,),
            most=lambda problem, rank: 2 * problem.ranks - 1,
        ),
        Family("zb", None, "searched under any memory limit (after 2401.10241)"),
        Family("zb-1p", None, "zb under p · M_B", limit=lambda p: p),
        Family("zb-2p", None, "zb under 2p · M_B", limit=lambda p: 2 * p),
        Family("zb-v", None, "V placement, at most p · M_B (2401.10241)", *_TWO_IN_V, limit=lambda p: p),
        Family(
            "v-half",
            None,
            "V placement, about p/2 · M_B (2405.15362)",
            *_TWO_IN_V,
            default_limit=lambda p: (p + 2) // 2,
        ),
        Family(
            "v-min",
            None,
            "V placement, about p/3 · M_B (2405.15362)",
            *_TWO_IN_V,
            default_limit=lambda p: (p + 4) // 3,
        ),
        Family(
            "1f1b-v",
            one_f_one_b,
            "ZB-V's order, B and W as one (2405.15362)",
            *_TWO_IN_V,
            joins=True,
            most=most_of_1f1b,
        ),
        Family(
            "dualpipe-v",
            dual_pipe_v,
            "DualPipeV without overlap, one model copy",
            *_TWO_IN_V,
            most=lambda problem, rank: 2 * problem.ranks + 1,
        ),
    )
}


def order_of(family: Family, problem: Problem) -> Order:
    """The order that the family builds; with uneven costs, if it is faster, that for the mean costs.  Of
    stages in parts it is that of the stages, an op as those of its parts.

    Raises ScheduleError for a limit that the family cannot keep.
    """
    assert family.function is not None, "its orders are built by rule"
    if problem.parts and not (family.by_stage and problem.ranks == 1):
        order = problem.order(
            ops_of_parts(order_of(family, problem.joined).ops, problem.parts, problem.costs)
        )
        _check_memory(family.name, problem, order)
        return order
    if not family.joins:
        check_least(family.name, problem)
    try:
        order = problem.order(family.function(problem))
    except ScheduleError as error:
        raise ScheduleError(f"schedule {family.name}: {error}") from error
    if len(set(problem.costs.stages)) > 1:
        with suppress(ScheduleError):  # it may have no order for the mean costs under the limit
            order = problem.fastest([order, problem.order(family.function(problem.with_mean_costs()))])
    _check_memory(family.name, problem, order)
    return order


def check_least(name: str, problem: Problem) -> None:
    """Raise LimitError if one microbatch alone exceeds a rank's limit: then no family with B and W apart can
    keep it."""
    smallest = problem.arrays.smallest_limits
    _check_limits(f"{name}: one microbatch", "B and W apart can keep", problem, smallest)


def _check_memory(name: str, problem: Problem, order: Order) -> None:
    if problem.is_limited:
        _check_limits(name, "it can keep", problem, order.peaks())


def _check_limits(what: str, keeps: str, problem: Problem, memory: Sequence[float]) -> None:
    """Raise LimitError if the memory of a rank exceeds its limit by more than rounding."""
    rank, text = rank_over(memory, problem.limits), problem.text
    if rank is not None:
        raise LimitError(
            f"schedule {what} needs {text.needs(memory[rank], rank, problem.limits[rank])}; the smallest "
            f"limit that {keeps} is {text.enough(memory)}",
            text.whole(memory),
        )
