"""The pool of orders of all problems: published orders, drawn orders, and annealing by halving."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain as joined
from itertools import zip_longest
from math import inf
from operator import attrgetter

import numpy as np

from fxpipe.errors import ScheduleError
from fxpipe.schedule.candidate import Candidate
from fxpipe.schedule.engine.dispatch import check_one_microbatch_fits
from fxpipe.schedule.engine.dispatch_kernel import NUMBERS, draw_ops
from fxpipe.schedule.engine.kernel import judge_ops
from fxpipe.schedule.engine.order import Order
from fxpipe.schedule.engine.tables import Floats
from fxpipe.schedule.families.registry import SEARCHED
from fxpipe.schedule.families.starts import starts
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.search.due_dates import cross, timetable
from fxpipe.schedule.search.local_search import improve

_EFFORT, _EFFORT_PER_OP = 8.0, 2e-3  # the default: seconds of one core at most, and for every op of a problem
_EFFORT_TO_HIDE, _EFFORT_TO_HIDE_PER_OP = 32.0, 1.6e-2  # the same where lanes exchange what parts hand on
_EFFORT_TO_ANNEAL, _EFFORT_PER_ORDER = 1.0, 1 / 15  # the same of orders that are given, and for each of them

_SPEED = 30_000_000  # ops that a core looks at in a second, about
_DRAWN = 0.3  # of the effort, for list scheduling
_LISTED = 8  # the cost of each op in a draw, in ops that are looked at
ANNEALED = 3_000  # looks at an op; with fewer, annealing is of no use and all effort goes into draws
_FEWEST, _MOST = 96, 1_536  # draws for a problem
_BATCH = 32  # draws that are made at a time, before the next are crossed
_KEPT = 16  # of the best draws, to cross
_WIDTH, _LAST = 32, 2  # orders that are annealed at first and at last
_LOOKS, _ENOUGH = 150, 1_000
"""At an op in the first round.  If each order of the pool gets fewer, fewer orders get enough each."""

_KEY = attrgetter("key")


class _Best(dict[Problem, Candidate]):
    """The best candidate so far of each problem."""

    def keep(self, candidates: Iterable[Candidate | None]) -> list[Candidate]:
        """Keep the best of one problem's candidates; return all, the best first, and of equally fast ones
        only the one that needs the least memory.
        """
        different: list[Candidate] = []
        for one in sorted(filter(None, candidates), key=_KEY):
            # They are sorted by seconds, then by peak: of equals the first needs the least.
            if not different or one.seconds > different[-1].seconds * (1 + 1e-9):
                different.append(one)
        for one in different[:1]:
            self[one.problem] = min(self.get(one.problem, one), one, key=_KEY)
        return different

    def can_gain(self, problem: Problem) -> bool:
        """Whether an order of a problem may be faster than the best of all."""
        return problem.bound * (1 + 1e-9) < min((one.seconds for one in self.values()), default=inf)


def find(problems: Sequence[Problem], effort: float | None = None, seed: int = 0) -> list[Candidate | None]:
    """The best order found for each problem; most of the work goes to the best problems.

    effort: about the seconds of one core; by default two milliseconds for every op, 8 s at most; 16 and 32 s
        where ops are to run beside exchanges.
    None for a problem in which one microbatch does not fit; raises ScheduleError if it fits in none.
    """
    able = [problem for problem in problems if reason_against(problem) is None]
    if not able:
        check_one_microbatch_fits(problems[0].arrays, problems[0].limits, problems[0].text)
    ops = sum(problem.ops for problem in able)
    hides = any(edge.exchange for problem in able for edge in problem.costs.edges)
    most, each = (_EFFORT_TO_HIDE, _EFFORT_TO_HIDE_PER_OP) if hides else (_EFFORT, _EFFORT_PER_OP)
    seconds = min(most, each * ops) if effort is None else effort
    spans: list[Order | None] = [None] * len(able)
    if any(len(set(problem.arrays.update)) > 1 for problem in able):
        # The order with the shortest span is one more start: with uneven updates annealing alone finds worse.
        # The two searches together take the effort that was asked for.
        seconds /= 2
        shortest = find([replace(problem, objective="span") for problem in able], seconds, seed)
        both = zip(able, shortest, strict=True)
        spans = [Order(problem.arrays, one.order.op_ids) if one else None for problem, one in both]
    work = _SPEED * seconds
    # See ``ANNEALED``: with less, drawing alone finds more.
    drawn = _DRAWN if work > ANNEALED * ops else 1.0
    best, candidates = _Best(), dict[Problem, list[Candidate]]()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for problem, order in zip(able, spans, strict=True):
            begun = [*starts(problem), *filter(None, [order])]
            best.keep(judged(problem, SEARCHED, order) for order in begun)
        # The most promising first: what it finds may leave out others.
        for problem in sorted(able, key=lambda problem: problem.bound):
            if problem not in best or best.can_gain(problem):
                candidates[problem] = _draw(problem, best, int(drawn * work / len(able)), seed, threads)
        # Two of every problem and the best others: annealing may change which problem has the fastest order.
        drawings = [candidates.get(problem, []) for problem in able]
        pool = [candidate for drawing in drawings for candidate in drawing[:2]]
        others = sorted((candidate for drawing in drawings for candidate in drawing[2:]), key=_KEY)
        # A fixed number, so that the work for each does not shrink with the problems.
        pool += others[: max(0, _WIDTH - len(pool))]
        work = int((1 - drawn) * work)
        looks = work / max(1, _rounds(pool) * len(pool)) * len(able) / ops
        if looks < _LOOKS:
            pool = sorted(pool, key=_KEY)[: max(1, int(len(pool) * looks / _ENOUGH))]
        _halve(pool, best, work, seed, threads)
    return [best.get(problem) for problem in problems]


def reason_against(problem: Problem) -> str | None:
    """The rank on which one microbatch does not fit, as a sentence; None if it fits on all."""
    try:
        check_one_microbatch_fits(problem.arrays, problem.limits, problem.text)
    except ScheduleError as error:
        return str(error)
    return None


def anneal_all(candidates: Sequence[Candidate], effort: float | None, seed: int) -> list[Candidate]:
    """Anneal one order of each problem together; most of the work goes to the best.

    effort: about the seconds of one core; None: a fifteenth for every order, 1 s at most.
    """
    if effort is None:
        effort = min(_EFFORT_TO_ANNEAL, _EFFORT_PER_ORDER * len(candidates))
    best = _Best((one.problem, one) for one in candidates)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        _halve([*candidates], best, int(_SPEED * effort), seed, threads)
    return [*best.values()]


def anneal_each(candidates: Sequence[Candidate], seed: int = 0) -> list[Candidate]:
    """Anneal each order as if it were alone."""
    # Of each, whatever the others are: they do not compete for it.
    work = int(_SPEED * _EFFORT_PER_ORDER)

    def better(one: Candidate) -> Candidate:
        return one if one.is_optimal else min(one, _annealed(one, work, seed), key=_KEY)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return [*threads.map(better, candidates)]


def judged(problem: Problem, family: str, order: Order) -> Candidate | None:
    """The order as a candidate; None if it breaks the limits."""
    return judged_all(problem, family, [order])[0]


def judged_all(problem: Problem, family: str, orders: Sequence[Order]) -> list[Candidate | None]:
    """Orders with the same arrays as candidates; None for those that break the limits."""
    limits, m = np.array(problem.limits, np.float64), problem.microbatches
    # One call of the compiled loop for all, which lets go of the GIL.
    rows = np.stack([order.op_ids for order in orders])
    seconds, peaks = judge_ops(orders[0].arrays.tables, rows, m, limits, problem.by_makespan)
    return [
        # Equal times that differ by rounding are equal keys, of which the peak decides.
        Candidate(problem, family, order, float(f"{took:.12g}"), float(peak)) if took < inf else None
        for order, took, peak in zip(orders, seconds, peaks, strict=True)
    ]


def _annealed(candidate: Candidate, work: int, seed: int) -> Candidate:
    problem = candidate.problem
    better = judged(problem, candidate.family, improve(problem, candidate.order, work, seed))
    assert better is not None, "local search keeps the limits"
    return better


def _draw(
    problem: Problem, best: _Best, work: int, seed: int, threads: ThreadPoolExecutor
) -> list[Candidate]:
    """The orders to anneal, the best first: in turn one of those that are published or crossed from good
    draws, and one of plain draws, since these are less alike.
    """
    m, arrays, random = problem.microbatches, problem.arrays, np.random.default_rng(seed)
    table = timetable(problem)
    # Few draws tell nothing, and the work of many is better spent on annealing.
    draws = max(_FEWEST, min(_MOST, work // (_LISTED * problem.ops)))
    parts = min(_BATCH, 2 * (os.cpu_count() or 1))
    near, far = best.keep([best.get(problem)]), list[Candidate]()
    parents: list[tuple[float, Floats]] = []

    def make(points: Floats) -> list[Candidate | None]:
        orders = draw_ops(arrays.tables, table, m, points)
        return judged_all(problem, SEARCHED, [Order(arrays, order) for order in orders])

    for _ in range(0, draws, _BATCH):
        # It is at the bound: no draw is faster.
        if problem in best and best[problem].is_optimal:
            break
        points, half = random.random((_BATCH, NUMBERS)), _BATCH // 2
        if parents:
            # The other half stays plain, so that the parents do not become alike.
            points[half:] = cross(np.array([point for _, point in parents]), half, random)
        judged_orders = [*joined.from_iterable(threads.map(make, np.array_split(points, parts)))]
        drawn = [(one.seconds, point) for one, point in zip(judged_orders, points, strict=True) if one]
        parents = sorted([*parents, *drawn], key=lambda pair: pair[0])[:_KEPT]
        near = best.keep([*near, *judged_orders[half:]])[:_WIDTH]
        far = best.keep([*far, *judged_orders[:half]])[:_WIDTH]
    in_turn = joined.from_iterable(zip_longest(near, far))
    return [candidate for candidate in in_turn if candidate][:_WIDTH]


def _rounds(pool: Sequence[Candidate]) -> int:
    return max(1, (len(pool) // _LAST).bit_length())


def _halve(pool: list[Candidate], best: _Best, work: int, seed: int, threads: ThreadPoolExecutor) -> None:
    """Anneal all; the better half continues with twice the work each, until few are left.

    An order whose bound is not below the best order has nothing to gain.
    """
    rounds, number = _rounds(pool), 0
    for _ in range(rounds):
        # An order of a problem whose bound is beaten cannot become the fastest.
        least = min((candidate.seconds for candidate in pool), default=inf)
        pool = [candidate for candidate in pool if least > candidate.problem.bound * (1 + 1e-9)]
        if not work or not pool:
            return
        # Each order has random numbers of its own, whichever thread anneals it: the result is the same on any
        # machine.
        each, seeds = work // (rounds * len(pool)), range(number, number := number + len(pool))
        better = threads.map(
            lambda one, turn, each=each: _annealed(one, each, ((seed << 16) + turn) % 2**32), pool, seeds
        )
        both = sorted([*pool, *better], key=_KEY)
        # Orders as fast as another are mostly the same one: a second would only take its share of the work.
        different = {candidate.seconds: candidate for candidate in reversed(both)}
        pool = [*different.values()][::-1][: max(1, len(pool) // 2)]
        for candidate in both:
            best.keep([candidate])
