"""What the exact searches share: OR-tools' CP-SAT, the conversion of times to integers, a progress line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rich.console import Console

from fxpipe.errors import FxpipeError

FINEST = 10**6
"""Maximum value of the largest number of a problem, in units of the numbers' common divisor."""

COARSE = 10**5
"""Its value if there is no such divisor, and numbers are rounded."""

WORKERS = 8
"""Number of parallel searches of CP-SAT: its strategies complement each other, also on fewer cores."""


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
