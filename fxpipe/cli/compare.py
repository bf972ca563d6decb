"""``fxpipe compare``: all schedules on the same costs, and the frontier of bubble against memory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from operator import attrgetter

from rich.console import Console
from rich.progress import track
from rich.table import Table

from fxpipe.cli.arguments import MemoryLimit, write_picture
from fxpipe.cli.planning import plan, problems
from fxpipe.cli.sources import CostSource, source_of
from fxpipe.errors import FxpipeError, ScheduleError, number_of
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.ops import Objective, Validation
from fxpipe.schedule.placement import PLACEMENTS
from fxpipe.schedule.search.auto import frontier as within_limits
from fxpipe.schedule.search.fastest import AUTO
from fxpipe.schedule.simulation.steps import simulate_steps
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.schedule.units import bubble_text
from fxpipe.viz.frontier_picture import FrontierPoint, frontier, frontier_svg
from fxpipe.viz.terminal import say

Outcome = Timeline | ScheduleError
"""The simulated schedule, or the reason why there is none."""


def compare_schedules(options: argparse.Namespace) -> None:
    source = source_of(options)
    validation: Validation | None = options.validation
    shown: Objective = "span" if validation == "post" else options.objective
    objective: Objective = "period" if validation == "post" else options.objective
    outcomes = dict(_outcomes(source, options, objective))
    timelines = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Timeline)}
    bubble_of = attrgetter(f"{shown}_bubble")
    points = [
        FrontierPoint(name, max(timeline.peak_memory), bubble_of(timeline))
        for name, timeline in timelines.items()
    ]
    if not points:
        raise FxpipeError(f"no schedule is possible: {outcomes[AUTO]}")
    sizes = f"{number_of(source.ranks, 'rank')}, {number_of(source.microbatches, 'microbatch')}"
    sizes += f"; {source.note}"
    if options.draw is not None:
        bubble = f"{shown} bubble"
        write_picture(options.draw, frontier_svg(points, sizes, bubble, source.units))
    if options.json:
        print(json.dumps([_figures(name, outcome, validation) for name, outcome in outcomes.items()]))
        return
    console = Console()
    say(console, sizes)
    best = {point.name for point in frontier(points)}
    console.print(_table(outcomes, best, source, validation))
    console.print(f"* no other schedule has both less memory and a smaller {shown} bubble", highlight=False)
    for name, outcome in outcomes.items():
        if isinstance(outcome, ScheduleError):
            say(console, f"{name}: {outcome}", style="dim")
    if options.draw is not None:
        say(console, f"drawn: {options.draw}")


def _outcomes(
    source: CostSource, options: argparse.Namespace, objective: Objective
) -> Iterator[tuple[str, Outcome]]:
    """The outcome of each family, then of ``auto`` under each limit."""
    console = Console(stderr=True)
    for name in track([*FAMILIES, AUTO], "compare", console=console, disable=not console.is_terminal):
        if name == AUTO:
            limits: Sequence[MemoryLimit] = options.limits
            labels = [AUTO, *(f"{AUTO} ≤ {limit.unit or format(limit, 'g')}" for limit in limits)]
            asked = problems(AUTO, source, options, options.memory_limit, objective)
            results = within_limits(asked, [options.memory_limit, *limits], effort=options.effort)
            for label, result in zip(labels, results, strict=True):
                yield label, result if isinstance(result, ScheduleError) else result.timeline
            continue
        try:
            yield name, plan(name, source, options, options.memory_limit, objective)
        except ScheduleError as error:
            yield name, error


def _period(timeline: Timeline, validation: Validation) -> float:
    return simulate_steps(timeline.schedule, timeline.costs, validation).period


def _figures(name: str, outcome: Outcome, validation: Validation | None) -> dict[str, object]:
    if isinstance(outcome, ScheduleError):
        return {"schedule": name, "why_not": str(outcome)}
    many = {} if validation is None else {"period": _period(outcome, validation)}
    return many | {
        "schedule": name,
        "placement": outcome.schedule.placement,
        "seconds": outcome.seconds,
        "span_bubble": outcome.span_bubble,
        "makespan_bubble": outcome.makespan_bubble,
        "peak_memory": outcome.peak_memory,
    }


def _table(
    outcomes: dict[str, Outcome], best: set[str], source: CostSource, validation: Validation | None
) -> Table:
    numbers = ["span bubble", "makespan bubble", "peak memory", "time"]
    if validation is not None:
        numbers.append("of many")
    table = Table("schedule", "stages per rank", "placement", *numbers)
    table.columns[0].no_wrap = True
    for column in (table.columns[1], *table.columns[3:]):
        column.justify = "right"
    for name, outcome in outcomes.items():
        if isinstance(outcome, ScheduleError):
            table.add_row(name, *"–" * (2 + len(numbers)), style="dim")
            continue
        schedule = outcome.schedule
        table.add_row(
            f"{name} *" if name in best else name,
            str(sum(not schedule.is_vocabulary(s) for s in range(schedule.stages)) // schedule.ranks),
            _placement(schedule.placement, schedule.ranks),
            bubble_text(outcome.span_bubble),
            bubble_text(outcome.makespan_bubble),
            source.units.memory(max(outcome.peak_memory)),
            source.units.time(outcome.seconds),
            *([] if validation is None else [source.units.time(_period(outcome, validation))]),
        )
    return table


def _placement(placement: tuple[int, ...], ranks: int) -> str:
    chunks = len(placement) // ranks
    return next((name for name, place in PLACEMENTS.items() if place(ranks, chunks) == placement), "other")
