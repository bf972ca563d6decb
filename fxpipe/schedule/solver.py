"""What the exact models share: OR-tools' CP-SAT, whole numbers for real ones, a line of progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rich.console import Console

from fxpipe.errors import FxpipeError

FINEST = 10**6
"""Units that the largest number of a problem makes at most, where the numbers have a common measure."""

COARSE = 10**5
"""Units that it makes where they have none."""

WORKERS = 8
"""CP-SAT's searches that run side by side: its methods work best together, also on fewer cores."""


@dataclass(frozen=True, eq=False)
class Solved:
    """``value`` reads a variable in the best solution, None where none was found; ``bound`` is the least
    that the objective can be."""

    value: Callable[[Any], int] | None
    bound: float
    proven: bool
    infeasible: bool


def cp_sat() -> Any:
    """The module ``ortools.sat.python.cp_model``: an optional extra, so it is imported where it is used."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise FxpipeError(
            "exact answers need OR-tools, which is not installed: pip install 'fxpipe[solver]'"
        ) from error
    return cp_model


def solve(model: Any, seconds: float, text: Callable[[float, float], str]) -> Solved:
    """Minimizes a model's objective for at most so many seconds.

    text: of the best value and the bound so far, for a line on a terminal.
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
    found = outcome in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Solved(
        solver.value if found else None,
        solver.best_objective_bound,
        outcome == cp_model.OPTIMAL,
        outcome == cp_model.INFEASIBLE,
    )


def unit_of(numbers: Iterable[float]) -> float:
    """What to count these numbers in: their greatest common measure, so that nothing is rounded; where
    that is less than 1/FINEST of the largest, 1/COARSE of the largest.
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
    """In whole units; a number that misses the next one by floating-point error alone is that one."""
    return math.floor(number / unit + 1e-6)


def rounded_up(number: float, unit: float) -> int:
    return math.ceil(number / unit - 1e-6)
