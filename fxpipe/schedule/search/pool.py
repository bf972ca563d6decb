"""The pool of orders of all problems: published orders, drawn orders, and annealing by halving."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain as joined
from itertools import zip_longest
from random import Random

from fxpipe.schedule.arrays import OpIds, fits, peaks, run
from fxpipe.schedule.dispatch import check_one_microbatch_fits, one_microbatch_fits
from fxpipe.schedule.goal import Goal, Objective
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.search.due_dates import Point, Timetable, cross, draw, least_period
from fxpipe.schedule.search.local_search import improve

_EFFORT, _EFFORT_PER_OP = 8.0, 2e-3  # the default: seconds of one core at most, and for every op of a problem

_SPEED = 30_000_000  # ops that a core looks at in a second, about
_DRAWN = 0.3  # of the effort, for list scheduling
_MADE, _LISTED = 6_000, 4  # the cost of a draw, and of each op in it, in ops that are looked at
_ANNEALED = 3_000  # looks at an op; with fewer, annealing is of no use and all effort goes into draws
_LARGE = 20_000  # ops of a problem whose draws are made by several threads
_FEWEST, _MOST = 96, 1_536  # draws for a problem
_BATCH = 32  # draws that are made at a time, and judged before the next
_KEPT = 16  # of the best draws, to cross
_WIDTH, _LAST = 32, 2  # orders that are annealed at first and at last

Starts = Callable[[Problem], Sequence[OpIds]]


@dataclass(frozen=True, eq=False)
class Found:
    """An order that keeps the limits of its problem, with its objective and its largest peak memory."""

    order: OpIds
    seconds: float
    peak: float


def find(
    problems: Sequence[Problem],
    starts: Starts,
    objective: Objective,
    effort: float | None = None,
    seed: int = 0,
) -> list[Found | None]:
    """The best order found for each problem; most of the work goes to the best problems.

    effort: about the seconds of one core; by default two milliseconds for every op, 8 s at most.
    None for a problem in which one microbatch does not fit; raises ScheduleError if it fits in none.
    """
    able = [problem for problem in problems if one_microbatch_fits(problem.arrays, problem.limits)]
    if not able:
        check_one_microbatch_fits(problems[0].arrays, problems[0].limits)
    tasks = [_Task(problem, objective) for problem in able]
    ops = sum(problem.ops for problem in able)
    work = _SPEED * (min(_EFFORT, _EFFORT_PER_OP * ops) if effort is None else effort)
    drawn = _DRAWN if work > _ANNEALED * ops else 1.0
    least = min(task.goal.bound for task in tasks)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        drawn_work, chains = int(drawn * work / len(tasks)), list[list[_Chain]]()
        for task in tasks:
            task.keep(map(task.judge, starts(task.problem)))
            chains.append(task.draw(drawn_work, seed, threads))
        # Two of every problem and the best others: draws say little about what annealing makes of them.
        pool = [chain for own in chains for chain in own[:2]]
        others = sorted((chain for own in chains for chain in own[2:]), key=lambda chain: _key(chain.found))
        pool += others[: max(0, _WIDTH - len(pool))]
        _halve(pool, least, int((1 - drawn) * work), seed, threads)
    best = {id(task.problem): task.best for task in tasks}
    return [best.get(id(problem)) for problem in problems]


class _Task:
    """A problem, its objective, and the best order so far."""

    def __init__(self, problem: Problem, objective: Objective) -> None:
        goal = Goal.for_problem(problem, objective)
        self.bound = max(goal.bound, problem.microbatches * least_period(problem))
        self.problem, self.goal = problem, Goal(objective, self.bound)
        self.best: Found | None = None

    @property
    def is_done(self) -> bool:
        """Has the best order reached the lower bound?"""
        return self.best is not None and self.best.seconds <= self.goal.bound * (1 + 1e-9)

    def judge(self, order: OpIds) -> Found | None:
        """None if the order breaks the limits."""
        problem, m = self.problem, self.problem.microbatches
        if not fits(problem.arrays, order, m, problem.limits):
            return None
        done = run(problem.arrays, order, m)
        assert done is not None, "an order that was made by running it cannot block"
        return Found(order, float(f"{self.goal.time(done):.12g}"), max(peaks(problem.arrays, order, m)))

    def keep(self, orders: Iterable[Found | None]) -> list[Found]:
        """Keep the best order in ``best``; return all, the best first, and of equally fast ones only the one
        that needs the least memory.
        """
        kept: list[Found] = []
        for one in sorted(filter(None, orders), key=_key):
            if not kept or one.seconds > kept[-1].seconds * (1 + 1e-9):
                kept.append(one)
        if kept and (self.best is None or _key(kept[0]) < _key(self.best)):
            self.best = kept[0]
        return kept

    def draw(self, work: int, seed: int, threads: ThreadPoolExecutor) -> list[_Chain]:
        """The orders to anneal, the best first: in turn one of those that are published or crossed from good
        draws, and one of plain draws, since these are less alike.
        """
        table, random = Timetable(self.problem), Random(seed)
        draws = max(_FEWEST, min(_MOST, work // (_LISTED * self.problem.ops + _MADE)))
        near, far = self.keep([self.best]), list[Found]()
        best: list[tuple[float, Point]] = []

        def make(point: Point) -> Found | None:
            return self.judge(table.order(point))

        # Most of a small draw is Python, for which threads would wait for the interpreter lock.
        each = threads.map if self.problem.ops > _LARGE else map
        for begin in range(0, draws, _BATCH):
            if self.is_done:
                break
            crossed = [bool(best) and k % 2 == 1 for k in range(min(_BATCH, draws - begin))]
            parents = [point for _, point in best]
            points = [
                cross(random.choice(parents), random.choice(parents), random) if v else draw(random)
                for v in crossed
            ]
            made = [*zip(each(make, points), points, crossed, strict=True)]
            best = sorted([*best, *((found.seconds, point) for found, point, _ in made if found)])[:_KEPT]
            near = self.keep([*near, *(found for found, _, v in made if v)])[:_WIDTH]
            far = self.keep([*far, *(found for found, _, v in made if not v)])[:_WIDTH]
        in_turn = joined.from_iterable(zip_longest(near, far))
        return [_Chain(self, found) for found in in_turn if found][:_WIDTH]


@dataclass(frozen=True, eq=False)
class _Chain:
    """An order that is annealed."""

    task: _Task
    found: Found

    def annealed(self, work: int, seed: int) -> _Chain:
        problem = self.task.problem
        arrays, m = problem.arrays, problem.microbatches
        better = self.task.judge(
            improve(arrays, self.found.order, m, problem.limits, self.task.goal, work, seed)
        )
        assert better is not None, "local search keeps the limits"
        return _Chain(self.task, better)


def _halve(pool: list[_Chain], least: float, work: int, seed: int, threads: ThreadPoolExecutor) -> None:
    """Anneal all; the better half continues with twice the work each, until few are left."""
    rounds, number = max(1, (len(pool) // _LAST).bit_length()), 0
    for _ in range(rounds):
        if not work or min(chain.found.seconds for chain in pool) <= least * (1 + 1e-9):
            return
        each, seeds = work // (rounds * len(pool)), range(number, number := number + len(pool))
        better = threads.map(
            lambda chain, own, each=each: chain.annealed(each, ((seed << 16) + own) % 2**32), pool, seeds
        )
        chains = sorted([*pool, *better], key=lambda chain: _key(chain.found))
        different = {chain.found.seconds: chain for chain in reversed(chains)}
        pool = [*different.values()][::-1][: max(1, len(pool) // 2)]
        for chain in chains:
            chain.task.keep([chain.found])


def _key(found: Found) -> tuple[float, float]:
    return found.seconds, found.peak
