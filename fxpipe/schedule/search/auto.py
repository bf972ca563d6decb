"""The search of ``schedule="auto"``: the fastest schedule of all families, placements and stages per rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

from fxpipe.errors import LimitError, ScheduleError, number_of
from fxpipe.schedule.candidate import Candidate, SearchResult
from fxpipe.schedule.engine.order import Order
from fxpipe.schedule.families.registry import SEARCHED, order_of
from fxpipe.schedule.problem import Limit, Problem, per_rank
from fxpipe.schedule.search.comparison import Comparison
from fxpipe.schedule.search.less_memory import with_less_memory
from fxpipe.schedule.search.pool import find, reason_against
from fxpipe.schedule.search.variants import families_of, variants

More = Callable[[float], Sequence[Problem]]
"""Further problems, given the objective of the best schedule before the search (inf if there is none)."""


def search(
    problems: Sequence[Problem], *, effort: float | None = None, seed: int = 0, more: More | None = None
) -> SearchResult:
    """The schedule with the least makespan, or the shortest span of a rank, within the memory limits.

    problems: with the same objective; among equally fast schedules, one that needs the least memory is taken.
    Every family is built in every problem, and one search covers all problems.
    effort: see :func:`.pool.find`.  seed: of the random numbers.
    more: asked for the problems that are worth making only if they can beat the best schedule that is built
        without a search.

    A variant of a problem is left out if its bound is above the best schedule so far; at first that is the
    best of those that are built by rule, in the variant with the least bound.
    Raises ScheduleError if no schedule fits, with the smallest limit that a schedule can keep.
    """
    if not problems:
        raise ScheduleError("nothing to search: give at least one problem")
    comparison, candidates, bounds = Comparison(), list[Candidate](), dict[Problem, float]()

    def build_all(problems: Sequence[Problem]) -> None:
        new = {variant: variant.bound for problem in problems for variant in variants(problem)}
        candidates.extend(_built(new, comparison))
        bounds.update(new)

    build_all(problems)
    if more is not None:
        # Only now is there a schedule that further problems have to beat.
        build_all(more(inf if comparison.best is None else comparison.best.key[0]))
    candidates += _searched(bounds, comparison, effort, seed)
    # The fastest estimates first: the sooner the best is complete, the more of the others are beaten.
    for one in sorted(candidates, key=lambda one: one.seconds):
        if one.problem.is_extended and comparison.is_beaten(one.seconds):
            what = "not completed: by estimate it takes"
            comparison.leave_out_beaten(one.problem, one.family, what, one.seconds)
        else:
            comparison.complete(one)
    if comparison.inserted:
        comparison.anneal(effort, seed)
    if comparison.best is None:
        raise _nothing_fits([*bounds], comparison)
    tried = (comparison.tried[variant, family.name] for variant in bounds for family in families_of(variant))
    return replace(comparison.best, tried=tuple(tried))


def frontier(
    problems: Sequence[Problem],
    memory_limits: Sequence[Limit],
    *,
    effort: float | None = None,
) -> list[SearchResult | ScheduleError]:
    """The result of ``search`` under each limit in place of the problems' own, or the error that it raises.

    A schedule found under one limit is a candidate under every other limit that it keeps, so more memory
    never costs time.  ``effort`` is per limit.
    """
    under: list[SearchResult | ScheduleError] = []
    for limit in memory_limits:
        try:
            limited = [replace(problem, limits=per_rank(limit, problem.ranks)) for problem in problems]
            under.append(search(limited, effort=effort))
        except ScheduleError as error:
            under.append(error)
    best = [outcome for outcome in under if isinstance(outcome, SearchResult)]
    choices: list[SearchResult | ScheduleError] = []
    for outcome, limit in zip(under, memory_limits, strict=True):
        if isinstance(outcome, SearchResult):
            # Whatever limit it was found under: only its peak counts.
            fitting = [one for one in best if one.timeline.fits(per_rank(limit, one.problem.ranks))]
            outcome = replace(min((outcome, *fitting), key=lambda result: result.key), tried=outcome.tried)
        choices.append(outcome)
    return choices


def _built(bounds: Mapping[Problem, float], comparison: Comparison) -> list[Candidate]:
    """The orders that are built by rule, in the variants that are not beaten; the shortest order of each
    variant is completed at once, in the variant with the least bound first.

    bounds: of each variant.
    """
    candidates = []
    for variant in sorted(bounds, key=bounds.__getitem__):
        # Others are complete as they are built, which takes no time to speak of.
        beaten = variant.is_extended and comparison.is_beaten(bounds[variant])
        orders = []
        for family in families_of(variant):
            if family.is_searched:
                continue
            if beaten:
                comparison.leave_out_beaten(variant, family.name, "not built: it takes", bounds[variant])
                continue
            try:
                orders.append(_candidate(variant, family.name, order_of(family, variant.model)))
            except ScheduleError as error:
                comparison.leave_out(variant, family.name, error)
                if isinstance(error, LimitError) and not variant.is_extended:
                    comparison.smallest_built.append((error.smallest, variant))
        orders.sort(key=lambda one: one.seconds)
        # One of each variant is enough to beat other variants by; the rest wait until they are known to
        # matter.
        for one in orders[:1]:
            comparison.complete(one)
        candidates += orders[1:]
    return candidates


def _candidate(problem: Problem, family: str, order: Order) -> Candidate:
    """An order of the model's own stages, with an estimate from below of its seconds when it is extended.

    No bound: where vocabulary stages are added, list scheduling may change the order.
    """
    done, work = order.run(), problem.work
    # The arrays need the stages of a rank in the model's order, which the costs do not: an order may block.
    seconds = work if done is None else max(work, problem.time(done))
    return Candidate(problem, family, order, seconds, max(order.peaks()))


def _searched(
    bounds: Mapping[Problem, float], comparison: Comparison, effort: float | None, seed: int
) -> list[Candidate]:
    """The orders that the search finds, in the variants that are not beaten; ``bounds``: of each variant."""
    able = []
    for variant, bound in bounds.items():
        if why := reason_against(variant.model):
            comparison.leave_out(variant, SEARCHED, why)
        elif comparison.is_beaten(bound):
            comparison.leave_out_beaten(variant, SEARCHED, "not searched: it takes", bound)
        else:
            able.append(variant)
    candidates = []
    # Orders beyond the limits, which offload brings below them, are faster: in one pool they would get all
    # the work.
    for is_beyond in (False, True):
        alike = [variant for variant in able if (variant.offload is not None) == is_beyond]
        orders = find([variant.model for variant in alike], effort, seed) if alike else []
        # In the fastest alone, since less memory takes annealing under many limits.
        fastest = min(filter(None, orders), key=lambda one: one.key, default=None)
        for variant, one in zip(alike, orders, strict=True):
            assert one is not None, "the search has an order where a microbatch fits"
            order = (with_less_memory(one, seed) if one is fastest else one).order
            candidates.append(_candidate(variant, SEARCHED, order))
    return candidates


def _nothing_fits(variants: Sequence[Problem], comparison: Comparison) -> LimitError:
    one = [(variant.text.whole(variant.model.arrays.smallest_limits), variant) for variant in variants]
    least, at = min(one + comparison.smallest_built, key=lambda pair: pair[0])
    offloaded = comparison.smallest
    widest = max(variants, key=lambda variant: min(variant.limits))
    limit, units = widest.text.limit(widest.limits), widest.text.units
    if offloaded < least:
        way = f"{units.limit(offloaded)}, with as much offload as the links carry. To need less, recompute"
        way += " activations"
    else:
        shape = f"{number_of(at.stages_per_rank, 'stage')} per rank in {at.shape} placement"
        way = f"{units.limit(least)}, with {shape}. To need less, offload or recompute activations"
    return LimitError(
        f"no schedule keeps the memory limit of {limit}; the smallest that one can keep is {way}, make "
        "microbatches smaller, or use more stages per rank",
        min(offloaded, least),
    )
