"""The best repeated block there is, proven: modulo scheduling of one microbatch.

In the steady state of a pipeline a microbatch enters every *period*, and each rank repeats the same ops.
A block is when the ops of one microbatch run (2405.15362); it can be repeated where no two ops of a rank
overlap modulo the period.  A period of the busiest rank's work is one without a bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

from fxpipe.errors import ScheduleError
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.dependencies import SECTION_KINDS, durations, needs, sections_of
from fxpipe.schedule.placement import stages_of
from fxpipe.schedule.solver import cp_sat, solve, unit_of

Life = tuple[float, float, float]
"""From when to when how much memory is held."""


@dataclass(frozen=True)
class Block:
    """``starts[stage]``: when F, B and W of the microbatch start.  Per rank in the steady state:
    ``mean_memory`` and ``peak_memory``, in the unit of ``StageCost.saved_activations``.

    ``bound``: what the greatest of the means cannot be below; ``proven``: it is that.
    """

    period: float
    starts: tuple[tuple[float, float, float], ...]
    mean_memory: tuple[float, ...]
    peak_memory: tuple[float, ...]
    bound: float
    proven: bool


def exact_block(
    costs: Costs, placement: tuple[int, ...], *, period: float | None = None, seconds: float = 60.0
) -> Block:
    """The block whose fullest rank holds the least on the average: lifetimes weighted by their bytes.

    period: the busiest rank's work if not given.  seconds: how long to search.
    What a rank hands from one of its stages to another is not counted.  Times are rounded to 1/100 000 of
    the longest where they have no common measure.
    Raises ScheduleError where the period is below that work or nothing was found in time, and FxpipeError
    where OR-tools is not installed.
    """
    work = max(sum(costs.stages[stage].total for stage in own) for own in stages_of(placement))
    period = work if period is None else period
    if period < work * (1 - 1e-9):
        raise ScheduleError(f"a period of {period:g} is shorter than the busiest rank's work of {work:g}")
    model = _Model(costs, placement, period)
    share = model.share
    found = solve(
        model.model, seconds, lambda value, bound: f"mean {value * share:.4g} … {bound * share:.4g}"
    )
    if found.value is None:
        raise ScheduleError(f"no block of period {period:g} was found in {seconds:g} s")
    times = [found.value(start) * model.unit for start in model.starts]
    starts = tuple(zip(times[::3], times[1::3], times[2::3], strict=True))
    lives = [[life for s in own for life in _lives(costs, s, starts[s])] for own in stages_of(placement)]
    return Block(
        period,
        starts,
        tuple(sum((end - begin) * size for begin, end, size in own) / period for own in lives),
        tuple(_peak(own, period) for own in lives),
        found.bound * share,
        found.proven,
    )


class _Model:
    """Start times in units; ``share`` makes a memory of the objective."""

    def __init__(self, costs: Costs, placement: tuple[int, ...], period: float) -> None:
        self.costs, self.owns = costs, stages_of(placement)
        table, times = needs(costs, placement), durations(costs)
        stages = range(len(placement))
        lengths = [times[kind][stage] for stage in stages for kind in SECTION_KINDS]
        waits = [table[kind][stage] for stage in stages for kind in SECTION_KINDS]
        delays = [delay for sources in waits for _, delay in sources]
        self.unit = unit_of([period, *lengths, *delays])
        self.lengths = [round(length / self.unit) for length in lengths]
        self.sections = [[section for stage in own for section in sections_of(stage)] for own in self.owns]
        work = max(sum(self.lengths[section] for section in own) for own in self.sections)
        self.period = max(work, round(period / self.unit))
        self.model = cp_sat().CpModel()
        # No op need wait a whole period beyond what it needs.
        self.horizon = sum(self.lengths) + sum(round(delay / self.unit) for delay in delays)
        self.horizon += self.period * len(lengths)
        # A shift of all ops changes nothing: one that waits for none starts at 0.
        sources = [section for section, waited in enumerate(waits) if not waited]
        earliest = -self.horizon if len(sources) > 1 else 0
        self.starts = [self.model.new_int_var(earliest, self.horizon, f"{s}") for s in range(len(lengths))]
        self.model.add(self.starts[sources[0]] == 0)
        for section, waited in enumerate(waits):
            for source, delay in waited:
                ready = self.starts[source] + self.lengths[source] + round(delay / self.unit)
                self.model.add(self.starts[section] >= ready)
        for own in self.sections:
            self._no_overlap(own)
        self._minimize_memory()

    def _no_overlap(self, own: Sequence[int]) -> None:
        """Every start is that of the rank's first op, whole periods, and a rest in which none overlap."""
        first, *others = own
        intervals = []
        most = 2 * self.horizon // self.period + 1
        for section in others:
            length = self.lengths[section]
            rest = self.model.new_int_var(self.lengths[first], self.period - length, "")
            periods = self.model.new_int_var(-most, most, "")
            self.model.add(self.starts[section] == self.starts[first] + self.period * periods + rest)
            intervals.append(self.model.new_fixed_size_interval_var(rest, length, ""))
        self.model.add_no_overlap(intervals)

    def _minimize_memory(self) -> None:
        costs = self.costs.stages
        unit = unit_of(size for cost in costs for size in (cost.saved_activations, cost.saved_for_weight))
        self.share = unit / self.period
        most = (
            2
            * self.horizon
            * sum(round((cost.saved_activations + cost.saved_for_weight) / unit) + 1 for cost in costs)
        )
        goal = self.model.new_int_var(0, most, "memory")
        for own in self.owns:
            total: Any = 0
            for stage in own:
                forward, backward, weight = sections_of(stage)
                middle = self.starts[backward] + self.lengths[backward]
                last = self.starts[weight] + self.lengths[weight]
                total += round(costs[stage].saved_activations / unit) * (middle - self.starts[forward])
                total += round(costs[stage].saved_for_weight / unit) * (last - middle)
            self.model.add(goal >= total)
        self.model.minimize(goal)


def _lives(costs: Costs, stage: int, starts: tuple[float, float, float]) -> list[Life]:
    forward, backward, weight = starts
    cost = costs.stages[stage]
    middle = backward + cost.backward
    return [(forward, middle, cost.saved_activations), (middle, weight + cost.weight, cost.saved_for_weight)]


def _peak(lives: Sequence[Life], period: float) -> float:
    """The most that is held at a time, each life begun anew every period: at the begin of one of them."""

    def held(at: float) -> float:
        return sum(
            size * (floor((at - begin) / period + 1e-9) - floor((at - end) / period + 1e-9))
            for begin, end, size in lives
        )

    return max(held(begin) for begin, _, _ in lives)
