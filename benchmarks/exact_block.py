"""Provably optimal repeated blocks: modulo scheduling of one microbatch, by CP-SAT.

In the steady state of a pipeline a microbatch enters every *period*, and each rank repeats the same ops.
A block is the start times of one microbatch's ops (2405.15362); it can be repeated if no two ops of a rank
overlap modulo the period.  If the period is the work of the busiest rank, the steady state has no bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

from fxpipe import ScheduleError
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.dependencies import SECTION_KINDS, durations, needs, sections_of
from fxpipe.schedule.exact.order import cp_sat, solve, unit_of
from fxpipe.schedule.placement import stages_of

Lifetime = tuple[float, float, float]
"""The begin and end of an allocation, and its bytes."""


@dataclass(frozen=True)
class Block:
    """``starts[stage]``: the start times of the microbatch's F, B and W.  Per rank in the steady state:
    ``mean_memory`` and ``peak_memory``, in the unit of ``StageCost.saved_activations``.

    ``bound``: a lower bound on the largest mean of any block.  ``proven``: this block reaches the bound.
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
    """The block with the smallest mean memory of the fullest rank.

    period: by default the work of the busiest rank.  seconds: maximum time of the search.
    Values that a rank hands from one of its stages to another are not counted.  Times without a common
    divisor are rounded to 1/100 000 of the longest.
    Raises ScheduleError if the period is shorter than that work or no block is found in time, and FxpipeError
    if OR-tools is not installed.
    """
    work = max(sum(costs.stages[stage].total for stage in own) for own in stages_of(placement))
    period = work if period is None else period
    if period < work * (1 - 1e-9):
        raise ScheduleError(
            f"a period of {period:g} is shorter than the busiest rank's work of {work:g}: give at least that"
        )
    model = _Model(costs, placement, period)
    share = model.share
    found = solve(
        model.model, seconds, lambda value, bound: f"mean {value * share:.4g} … {bound * share:.4g}"
    )
    if found.value is None:
        raise ScheduleError(
            f"the exact search found no block of period {period:g} in {seconds:g} s: give it more seconds, "
            "or a longer period"
        )
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
    """Start times in whole units; ``share`` times the objective is a mean memory."""

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
        # In some optimal block no op waits a whole period longer than for its inputs.
        self.horizon = sum(self.lengths) + sum(round(delay / self.unit) for delay in delays)
        self.horizon += self.period * len(lengths)
        # Shifting all ops by one time changes nothing, so an op without inputs can start at 0.
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
        """Every start is the start of the rank's first op, plus whole periods, plus an offset in the period;
        the ops must not overlap at their offsets."""
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
        to_b = [cost.saved_activations for cost in costs]
        to_w = [cost.saved_for_weight for cost in costs]
        unit = unit_of([*to_b, *to_w])
        self.share = unit / self.period
        most = 2 * self.horizon * sum(round((b + w) / unit) + 1 for b, w in zip(to_b, to_w, strict=True))
        goal = self.model.new_int_var(0, most, "memory")
        for own in self.owns:
            total: Any = 0
            for stage in own:
                forward, backward, weight = sections_of(stage)
                middle = self.starts[backward] + self.lengths[backward]
                last = self.starts[weight] + self.lengths[weight]
                total += round(to_b[stage] / unit) * (middle - self.starts[forward])
                total += round(to_w[stage] / unit) * (last - middle)
            self.model.add(goal >= total)
        self.model.minimize(goal)


def _lives(costs: Costs, stage: int, starts: tuple[float, float, float]) -> list[Lifetime]:
    forward, backward, weight = starts
    cost = costs.stages[stage]
    middle = backward + cost.backward
    return [(forward, middle, cost.saved_activations), (middle, weight + cost.weight, cost.saved_for_weight)]


def _peak(lives: Sequence[Lifetime], period: float) -> float:
    """The peak memory of lifetimes that repeat every period.  It occurs at the begin of one of them."""

    def held(at: float) -> float:
        return sum(
            size * (floor((at - begin) / period + 1e-9) - floor((at - end) / period + 1e-9))
            for begin, end, size in lives
        )

    return max(held(begin) for begin, _, _ in lives)
