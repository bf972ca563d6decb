"""``fxpipe simulate``: bubble, memory and timeline of one schedule."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fxpipe.cli.arguments import flag, working, write_picture
from fxpipe.cli.batch import batch_of
from fxpipe.cli.figures import figures, print_timeline
from fxpipe.cli.planning import plan
from fxpipe.cli.sources import CostSource, source_of
from fxpipe.cli.ways import print_ways, ways_as_json
from fxpipe.errors import FxpipeError, ScheduleError, number_of
from fxpipe.schedule.exact.order import Exact, cp_sat, exact
from fxpipe.schedule.formats.handwritten import is_file_name, read_schedule
from fxpipe.schedule.memory_text import MemoryText
from fxpipe.schedule.offload.planner import FULL, OffloadPlan, offload, offload_within, with_link
from fxpipe.schedule.ops import Objective, Schedule
from fxpipe.schedule.search.fastest import AUTO
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.steps import Steps, simulate_steps
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.schedule.units import Units
from fxpipe.viz.terminal import say
from fxpipe.viz.timeline_picture import timeline_svg


def simulate_schedule(options: argparse.Namespace) -> None:
    if options.exact is not None:
        cp_sat()  # before the search, which may take minutes
    batch = batch_of(options)
    source, timeline = _timeline(options) if batch is None else (batch.source, batch.timeline)
    best = None if options.exact is None else _exact(options, timeline)
    whole, moved = timeline, _offload(options, timeline, source.units)
    timeline = timeline if moved is None else moved.timeline
    limits = None if options.memory_limit is None else [options.memory_limit] * source.ranks
    if options.draw is not None:
        write_picture(options.draw, timeline_svg(_drawn(options, timeline), source.note, source.units))
    if options.json:
        more: dict[str, object] = {}
        if batch is not None:
            more["lengths"] = [n for each in batch.lengths for n in each.values()]
        if batch is not None and batch.ways:
            more |= ways_as_json(options.lengths, options.seed, batch.steps, batch.ways)
        print(json.dumps(figures(timeline, best, moved, limits) | more))
        return
    console = Console(markup=False, emoji=False)
    print_timeline(console, timeline, source, best, None if moved is None else (whole, moved), limits)
    if batch is not None and batch.ways:
        print_ways(console, options.lengths, options.seed, batch.steps, batch.ways, source.units)
    if options.draw is not None:
        say(console, f"drawn: {options.draw}")


def _timeline(options: argparse.Namespace) -> tuple[CostSource, Timeline]:
    if options.schedule_file is None and is_file_name(options.schedule):
        options.schedule_file, options.schedule = Path(options.schedule), None
    if options.schedule is not None and options.schedule_file is not None:
        raise FxpipeError("--schedule and --schedule-file exclude each other: give one of them")
    written = None if options.schedule_file is None else read_schedule(options.schedule_file)
    if written is not None:
        options.ranks = options.ranks or written.ranks
        options.microbatches = options.microbatches or written.microbatches
    source = source_of(options)
    written = written or (source.schedule if options.schedule is None else None)
    if written is not None:
        return source, _simulate_written(written, source, options)
    if options.schedule is None:
        raise FxpipeError("--schedule NAME or --schedule-file FILE is required")
    limit = None if options.offload == AUTO else options.memory_limit
    objective: Objective = "period" if options.validation == "post" else options.objective
    with working("simulate"):
        return source, plan(options.schedule, source, options, limit, objective)


def _drawn(options: argparse.Namespace, timeline: Timeline) -> Timeline | Steps:
    """What the picture shows; more than one step are such as repeat."""
    if options.steps == 1:
        return timeline
    many = simulate_steps(timeline.schedule, timeline.costs, options.validation, options.steps + 1)
    return many.last(options.steps)


def _simulate_written(schedule: Schedule, source: CostSource, options: argparse.Namespace) -> Timeline:
    """Simulate a given schedule.  Raises ScheduleError if it contradicts the arguments or the limit."""
    asked = {
        "rank": (schedule.ranks, source.ranks),
        "microbatch": (schedule.microbatches, source.microbatches),
    }
    for what, (has, number) in asked.items():
        if has != number:
            raise ScheduleError(
                f"schedule {schedule.name} has {number_of(has, what)}, but the arguments or costs "
                f"have {number}"
            )
    chunks, rest = divmod(schedule.stages, schedule.ranks)
    if rest and source.stages_per_rank is None:
        raise ScheduleError(
            f"schedule {schedule.name} has {schedule.stages} stages on {schedule.ranks} ranks, so ranks hold "
            "different numbers of stages: give the costs of each stage with --costs"
        )
    timeline = simulate(schedule, source.costs(chunks))
    limit, peaks = options.memory_limit, timeline.peak_memory
    if limit is not None and max(peaks) > limit * (1 + 1e-9):
        fullest = max(range(len(peaks)), key=peaks.__getitem__)
        raise ScheduleError(
            f"schedule {schedule.name} needs {source.units.memory(peaks[fullest])} on rank {fullest}, above "
            f"the memory limit of {source.units.memory(limit)}: raise the limit, or offload"
        )
    return timeline


def _offload(options: argparse.Namespace, timeline: Timeline, units: Units) -> OffloadPlan | None:
    if options.offload_time is None:
        for name in ("offload", "ranks_per_link"):
            if getattr(options, name) is not None:
                raise FxpipeError(f"{flag(name)} needs --offload-time")
        return None
    timeline = replace(
        timeline, costs=with_link(timeline.costs, options.offload_time, options.ranks_per_link or 1)
    )
    if options.offload != AUTO:
        return offload(timeline, FULL if options.offload is None else options.offload)
    if options.memory_limit is None:
        raise FxpipeError("--offload auto needs --memory-limit")
    return offload_within(timeline, [options.memory_limit] * timeline.schedule.ranks, MemoryText(units))


def _exact(options: argparse.Namespace, timeline: Timeline) -> Exact:
    """The optimal schedule within the memory limit, by default within the schedule's own peak memory."""
    return exact(
        timeline.costs,
        timeline.schedule.placement,
        timeline.schedule.microbatches,
        memory_limit=max(timeline.peak_memory) if options.memory_limit is None else options.memory_limit,
        objective=options.objective,
        seconds=options.exact,
        start=timeline.schedule,
    )
