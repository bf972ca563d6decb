"""The pool of orders of all problems: published orders, drawn orders, and annealing by halving."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain as joined
from itertools import zip_longest
from math import inf

import numpy as np

from fxpipe.schedule.engine.arrays import OpIds, ScheduleArrays
from fxpipe.schedule.engine.dispatch import check_one_microbatch_fits, one_microbatch_fits
from fxpipe.schedule.engine.dispatch_kernel import NUMBERS, draw_ops
from fxpipe.schedule.engine.kernel import Floats, judge_ops
from fxpipe.schedule.families.starts import starts
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.search.due_dates import cross, least_period, timetable
from fxpipe.schedule.search.goal import Goal, Objective
from fxpipe.schedule.search.local_search import improve

_EFFORT, _EFFORT_PER_OP = 8.0, 2e-3  # the default: seconds of one core at most, and for every op of a problem
_EFFORT_TO_ANNEAL, _EFFORT_PER_TASK = 1.0, 1 / 15  # the same of orders that are given, and for each of them

_SPEED = 30_000_000  # ops that a core looks at in a second, about
_DRAWN = 0.3  # of the effort, for list scheduling
_LISTED = 8  # the cost of each op in a draw, in ops that are looked at
_ANNEALED = 3_000  # looks at an op; with fewer, annealing is of no use and all effort goes into draws
_FEWEST, _MOST = 96, 1_536  # draws for a problem
_BATCH, _PARTS = 32, 16  # draws that are made at a time, before the next are crossed; in so many parts
_KEPT = 16  # of the best draws, to cross
_WIDTH, _LAST = 32, 2  # orders that are annealed at first and at last


@dataclass(frozen=True, eq=False)
class Found:
    """An order that keeps the limits of its problem, with its objective and its largest peak memory."""

    task: Task
    order: OpIds
    seconds: float
    peak: float


def find(
    problems: Sequence[Problem],
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
    tasks = [_task(problem, objective) for problem in able]
    ops = sum(problem.ops for problem in able)
    work = _SPEED * (min(_EFFORT, _EFFORT_PER_OP * ops) if effort is None else effort)
    drawn = _DRAWN if work > _ANNEALED * ops else 1.0
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        drawn_work, drafts = int(drawn * work / len(tasks)), list[list[Found]]()
        for problem, task in zip(able, tasks, strict=True):
            task.keep(map(task.judge, starts(problem)))
            drafts.append(_draw(problem, task, drawn_work, seed, threads))
        # Two of every problem and the best others: draws say little about what annealing makes of them.
        pool = [found for own in drafts for found in own[:2]]
        others = sorted((found for own in drafts for found in own[2:]), key=_key)
        pool += others[: max(0, _WIDTH - len(pool))]
        _halve(pool, int((1 - drawn) * work), seed, threads)
    best = {id(problem): task.best for problem, task in zip(able, tasks, strict=True)}
    return [best.get(id(problem)) for problem in problems]


def anneal_all(tasks: Sequence[Task], effort: float | None = None, seed: int = 0) -> None:
    """Anneal the best order of each task; most of the work goes to the best tasks.

    effort: about the seconds of one core; by default a fifteenth for every task, 1 s at most.
    """
    if effort is None:
        effort = min(_EFFORT_TO_ANNEAL, _EFFORT_PER_TASK * len(tasks))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        _halve([task.best for task in tasks if task.best], int(_SPEED * effort), seed, threads)


def anneal_each(tasks: Sequence[Task], seed: int = 0) -> None:
    """Anneal the best order of each task as if it were alone."""
    work = int(_SPEED * _EFFORT_PER_TASK)

    def anneal(task: Task) -> Found | None:
        return None if task.best is None or task.is_done else task.anneal(task.best, work, seed)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for task, found in zip(tasks, threads.map(anneal, tasks), strict=True):
            task.keep([found])


def _task(problem: Problem, objective: Objective) -> Task:
    bound = max(Goal.for_problem(problem, objective).bound, problem.microbatches * least_period(problem))
    return Task(problem.arrays, problem.microbatches, problem.limits, Goal(objective, bound))


class Task:
    """Stages on ranks, their memory limits, the goal, and the best order so far."""

    def __init__(
        self, arrays: ScheduleArrays, microbatches: int, limits: Sequence[float], goal: Goal
    ) -> None:
        self.arrays, self.microbatches, self.goal = arrays, microbatches, goal
        self.tables, self.limits = arrays.tables(microbatches), tuple(limits)
        self._limits = np.array(limits, np.float64)
        self.best: Found | None = None

    @property
    def seconds(self) -> float:
        """The objective of the best order; inf if there is none."""
        return inf if self.best is None else self.best.seconds

    @property
    def is_done(self) -> bool:
        """Has the best order reached the lower bound?"""
        return self.seconds <= self.goal.bound * (1 + 1e-9)

    def judge(self, order: OpIds) -> Found | None:
        """None if the order breaks the limits."""
        m, by_makespan = self.microbatches, self.goal.by_makespan
        seconds, peak = judge_ops(self.tables, order, m, self._limits, by_makespan)
        return Found(self, order, float(f"{seconds:.12g}"), peak) if seconds < inf else None

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

    def anneal(self, found: Found, work: int, seed: int) -> Found:
        m = self.microbatches
        order = improve(self.arrays, found.order, m, self.limits, self.goal, work, seed)
        better = self.judge(order)
        assert better is not None, "local search keeps the limits"
        return better


def _draw(problem: Problem, task: Task, work: int, seed: int, threads: ThreadPoolExecutor) -> list[Found]:
    """The orders to anneal, the best first: in turn one of those that are published or crossed from good
    draws, and one of plain draws, since these are less alike.
    """
    m, random = problem.microbatches, np.random.default_rng(seed)
    table = timetable(problem, least_period(problem))
    draws = max(_FEWEST, min(_MOST, work // (_LISTED * problem.ops)))
    near, far = task.keep([task.best]), list[Found]()
    best: list[tuple[float, Floats]] = []

    def make(points: Floats) -> list[Found | None]:
        return [task.judge(order) for order in draw_ops(task.tables, table, m, points)]

    for _ in range(0, draws, _BATCH):
        if task.is_done:
            break
        points, half = random.random((_BATCH, NUMBERS)), _BATCH // 2
        if best:
            points[half:] = cross(np.array([point for _, point in best]), half, random)
        made = [*joined.from_iterable(threads.map(make, np.split(points, _PARTS)))]
        drawn = [(found.seconds, point) for found, point in zip(made, points, strict=True) if found]
        best = sorted([*best, *drawn], key=lambda pair: pair[0])[:_KEPT]
        near = task.keep([*near, *made[half:]])[:_WIDTH]
        far = task.keep([*far, *made[:half]])[:_WIDTH]
    in_turn = joined.from_iterable(zip_longest(near, far))
    return [found for found in in_turn if found][:_WIDTH]


def _halve(pool: list[Found], work: int, seed: int, threads: ThreadPoolExecutor) -> None:
    """Anneal all; the better half continues with twice the work each, until few are left.

    An order whose bound is not below the best order has nothing to gain.
    """
    rounds, number = max(1, (len(pool) // _LAST).bit_length()), 0
    for _ in range(rounds):
        best = min((found.seconds for found in pool), default=inf)
        pool = [found for found in pool if best > found.task.goal.bound * (1 + 1e-9)]
        if not work or not pool:
            return
        each, seeds = work // (rounds * len(pool)), range(number, number := number + len(pool))
        better = threads.map(
            lambda found, own, each=each: found.task.anneal(found, each, ((seed << 16) + own) % 2**32),
            pool,
            seeds,
        )
        both = sorted([*pool, *better], key=_key)
        different = {found.seconds: found for found in reversed(both)}
        pool = [*different.values()][::-1][: max(1, len(pool) // 2)]
        for found in both:
            found.task.keep([found])


def _key(found: Found) -> tuple[float, float]:
    return found.seconds, found.peak
