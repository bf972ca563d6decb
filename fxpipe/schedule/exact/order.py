"""Provably optimal schedules of small problems, by CP-SAT.

The variables are the start times of every section and microbatch.  The microbatches of a section run in
order: microbatches are interchangeable, so any schedule can be renumbered to one that does, with the same
times and memory.  Times are integers in units of their greatest common divisor if they have one, and
otherwise rounded down to 1/100 000 of the longest, so that the bound also holds for the exact times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

from rich.console import Console

from fxpipe.errors import FxpipeError, ScheduleError
from fxpipe.schedule.bound import in_order, lower_bound, work_and_waits
from fxpipe.schedule.costs import Costs, Edge, StageCost
from fxpipe.schedule.dependencies import Needs, index, op_of_value, sections_of
from fxpipe.schedule.ops import PHASES, Color, Objective, Phase, RankOps, Schedule
from fxpipe.schedule.placement import stages_of
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline

FINEST = 10**6
"""Maximum value of the largest number of a problem, in units of the numbers' common divisor."""

COARSE = 10**5
"""Its value if there is no such divisor, and numbers are rounded."""

WORKERS = 8
"""Number of parallel searches of CP-SAT: its strategies complement each other, also on fewer cores."""

Lifetime = tuple[Any, Any, float]
"""The begin and end of an allocation, as variables, and its bytes."""


@dataclass(frozen=True)
class Exact:
    """The best schedule found.

    ``value`` and ``bound``: the objective of this schedule and a lower bound on that of any schedule, in
    seconds.  ``proven``: this schedule is optimal, up to the rounding of times.
    """

    timeline: Timeline
    value: float
    bound: float
    proven: bool

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule


def exact(
    costs: Costs,
    placement: tuple[int, ...],
    microbatches: int,
    *,
    memory_limit: float | Sequence[float] | None = None,
    objective: Objective = "makespan",
    seconds: float = 60.0,
    start: Schedule | None = None,
) -> Exact:
    """The schedule of separate B and W ops with the smallest makespan or the smallest span (the longest of
    the ranks' times from first op to last).

    memory_limit: one for all ranks, or one for each, in the unit of ``StageCost.saved_activations``.
    seconds: maximum time of the search.  start: a schedule of this placement to start from.
    Raises ScheduleError if no schedule keeps the limit or none is found in time, and FxpipeError if OR-tools
    is not installed.
    """
    model = _Model(costs, placement, microbatches)
    if memory_limit is not None:
        ranks = max(placement) + 1
        model.limit_memory(memory_limit if isinstance(memory_limit, Sequence) else [memory_limit] * ranks)
    model.minimize(objective)
    if start is not None:
        model.begin_with(simulate(start, costs))
    unit = model.unit
    solved = solve(model.model, seconds, lambda value, bound: f"{value * unit:.6g} … {bound * unit:.6g}")
    if solved.infeasible:
        raise ScheduleError(
            f"no schedule of this placement keeps the memory limit {memory_limit}: raise it, or leave it out"
        )
    if solved.value is None:
        raise ScheduleError(
            f"the exact search found no schedule in {seconds:g} s: give it more seconds, fewer ranks or "
            "microbatches, or a schedule to start from"
        )
    timeline = simulate(Schedule("exact", placement, microbatches, model.order(solved.value)), costs)
    value, bound = timeline.seconds, lower_bound(costs, placement, microbatches)
    if objective == "span":
        value, bound = timeline.span, max(timeline.busy)
    return Exact(timeline, value, min(value, max(bound, solved.bound * unit)), solved.proven)


class _Model:
    """Variables and constraints; sections are numbered as in :mod:`fxpipe.schedule.dependencies`."""

    def __init__(self, costs: Costs, placement: tuple[int, ...], microbatches: int) -> None:
        self.costs, self.placement, self.microbatches = costs, placement, microbatches
        durations, waits = work_and_waits(costs, placement)
        self.turn = {section: turn for turn, section in enumerate(in_order(waits))}
        self.unit = unit_of([*durations, *(delay for sources in waits for _, delay in sources)])
        self.durations = [rounded_down(duration, self.unit) for duration in durations]
        self.model = cp_sat().CpModel()
        delays = sum(rounded_down(delay, self.unit) for sources in waits for _, delay in sources)
        # The time of a step that runs one op or message at a time.
        self.horizon = microbatches * (sum(self.durations) + delays)
        self.starts = [
            [self.model.new_int_var(0, self.horizon, f"{section}.{j}") for j in range(microbatches)]
            for section in range(len(durations))
        ]
        self.owns = [
            [section for stage in row for section in sections_of(stage)] for row in stages_of(placement)
        ]
        self._keep_order(waits)

    def _keep_order(self, waits: list[Needs]) -> None:
        for section, sources in enumerate(waits):
            for j, start in enumerate(self.starts[section]):
                for source, delay in sources:
                    self.model.add(start >= self.end(source, j) + rounded_down(delay, self.unit))
                if j:
                    self.model.add(start >= self.end(section, j - 1))
        for sections in self.owns:
            self.model.add_no_overlap(
                self.model.new_fixed_size_interval_var(start, self.durations[section], "")
                for section in sections
                for start in self.starts[section]
            )

    def end(self, section: int, microbatch: int) -> Any:
        return self.starts[section][microbatch] + self.durations[section]

    def limit_memory(self, limits: Sequence[float]) -> None:
        """Live memory as intervals with bytes, by the same rules as ``Timeline.memory``."""
        lives: list[list[Lifetime]] = [[] for _ in limits]
        for j in range(self.microbatches):
            for stage, cost in enumerate(self.costs.stages):
                lives[self.placement[stage]] += self._held_by(stage, cost, j)
            for edge in self.costs.edges:
                rank = self.placement[edge.source.stage]
                if rank == self.placement[edge.target.stage]:
                    lives[rank].append(self._handed(edge, j))
        for limit, intervals in zip(limits, lives, strict=True):
            self._at_most(limit, [life for life in intervals if life[2]])

    def _held_by(self, stage: int, cost: StageCost, microbatch: int) -> tuple[Lifetime, Lifetime]:
        forward, backward, weight = sections_of(stage)
        begin, end = self.starts[forward][microbatch], self.end(weight, microbatch)
        middle = self.end(backward, microbatch)
        to_b, to_w = cost.saved_activations, cost.saved_for_weight
        # One interval for what is held all the time, and one for the rest, before the end of B or behind it.
        part = (begin, middle) if to_b > to_w else (middle, end)
        return (begin, end, min(to_b, to_w)), (*part, abs(to_b - to_w))

    def _handed(self, edge: Edge, microbatch: int) -> Lifetime:
        """The lifetime of a value that one stage hands to another stage of its rank.

        The value also counts if its consumer starts the moment its producer ends, so the interval gets one
        unit more, at the end where the op itself allocates and frees nothing.
        """
        begin = self.end(index(edge.source), microbatch)
        end = self.starts[index(edge.target)][microbatch]
        if edge.source.phase is Phase.F:
            return begin - 1, end, edge.bytes
        return begin, end + 1, edge.bytes

    def _at_most(self, limit: float, lives: Sequence[Lifetime]) -> None:
        unit = unit_of(size for _, _, size in lives)
        intervals = [
            self.model.new_interval_var(begin, self.model.new_int_var(0, self.horizon + 1, ""), end, "")
            for begin, end, _ in lives
        ]
        sizes = [rounded_up(size, unit) for _, _, size in lives]
        self.model.add_cumulative(intervals, sizes, rounded_down(limit, unit))

    def minimize(self, objective: Objective) -> None:
        goal = self.model.new_int_var(0, self.horizon, objective)
        for sections in self.owns:
            # All schedules keep it: given to the solver, it is part of the bound from the start.
            self.model.add(goal >= self.microbatches * sum(self.durations[section] for section in sections))
            begins = [self.starts[section][0] for section in sections] if objective == "span" else [0]
            for section, begin in product(sections, begins):
                self.model.add(goal >= self.end(section, self.microbatches - 1) - begin)
        if objective == "makespan":
            bound = lower_bound(self.costs.of_ops, self.placement, self.microbatches)
            self.model.add(goal >= rounded_down(bound, self.unit))
        self.model.minimize(goal)

    def begin_with(self, timeline: Timeline) -> None:
        for spans in timeline.spans:
            for op, start, _ in spans:
                at = round(start / self.unit)
                for phase in PHASES[op.kind]:
                    section = index(Color(op.stage, phase))
                    self.model.add_hint(self.starts[section][op.microbatch], at)
                    at += self.durations[section]

    def order(self, value: Any) -> RankOps:
        """The ops of each rank by start time; ops that take no time, in dependency order."""

        def key(section: int, microbatch: int) -> tuple[int, int, int]:
            start = value(self.starts[section][microbatch])
            return start, start + self.durations[section], self.turn[section]

        ranks = []
        for sections in self.owns:
            values = sorted((key(s, j), s, j) for s in sections for j in range(self.microbatches))
            ranks.append(
                tuple(op_of_value(s * self.microbatches + j, self.microbatches) for _, s, j in values)
            )
        return tuple(ranks)


@dataclass(frozen=True, eq=False)
class Solved:
    """``value`` reads a variable of the best solution; it is None if no solution was found.  ``bound`` is a
    lower bound on the objective."""

    value: Callable[[Any], int] | None
    bound: float
    proven: bool
    infeasible: bool


def cp_sat() -> Any:
    """The module ``ortools.sat.python.cp_model``, imported on use since OR-tools is an optional extra."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise FxpipeError(
            "exact answers need OR-tools, which is not installed: pip install 'fxpipe[solver]'"
        ) from error
    return cp_model


def solve(model: Any, seconds: float, text: Callable[[float, float], str]) -> Solved:
    """Minimize a model's objective for at most ``seconds``.

    text: the progress line for the terminal, from the best value and the bound so far.
    """
    cp_model = cp_sat()
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = WORKERS
    with Console(stderr=True).status("exact: searching") as status:

        class Progress(cp_model.CpSolverSolutionCallback):  # type: ignore[name-defined, misc]
            def on_solution_callback(self) -> None:
                status.update(f"exact: {text(self.objective_value, self.best_objective_bound)}")

        outcome = solver.solve(model, Progress())
    has_value = outcome in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Solved(
        solver.value if has_value else None,
        solver.best_objective_bound,
        outcome == cp_model.OPTIMAL,
        outcome == cp_model.INFEASIBLE,
    )


def unit_of(numbers: Iterable[float]) -> float:
    """The unit for rounding numbers to integers: their greatest common divisor, which rounds nothing; if that
    is less than 1/FINEST of the largest number, 1/COARSE of the largest number.
    """
    present = [number for number in numbers if number]
    if not present:
        return 1.0
    largest = max(present)
    ratios = [Fraction(number / largest).limit_denominator(FINEST) for number in present]
    finest = math.lcm(*(ratio.denominator for ratio in ratios))
    measure = Fraction(math.gcd(*(int(ratio * finest) for ratio in ratios)), finest)
    exact = all(abs(float(r) * largest - n) <= 1e-12 * largest for r, n in zip(ratios, present, strict=True))
    return float(measure) * largest if exact and measure * FINEST >= 1 else largest / COARSE


def rounded_down(number: float, unit: float) -> int:
    """The number in whole units; one below a whole one by floating-point error alone counts as that."""
    return math.floor(number / unit + 1e-6)


def rounded_up(number: float, unit: float) -> int:
    return math.ceil(number / unit - 1e-6)
