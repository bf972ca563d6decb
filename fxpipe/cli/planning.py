"""Simulates the schedules that a command asks for."""

from __future__ import annotations

import argparse

from fxpipe.cli.sources import CostSource
from fxpipe.errors import ScheduleError
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.memory_text import MemoryText
from fxpipe.schedule.ops import Objective
from fxpipe.schedule.problem import Problem, per_rank
from fxpipe.schedule.search.fastest import AUTO, fastest, stages_and_placements, unknown_schedule
from fxpipe.schedule.simulation.timeline import Timeline


def plan(
    name: str, source: CostSource, options: argparse.Namespace, limit: float | None, objective: Objective
) -> Timeline:
    """The simulated schedule of a family, or of the search for the fastest.

    Raises ScheduleError as :func:`fxpipe.schedule.search.build.build` and ``search`` do.
    """
    if name not in (*FAMILIES, AUTO):
        raise ScheduleError(unknown_schedule(name))
    return fastest(name, problems(name, source, options, limit, objective), effort=options.effort).timeline


def problems(
    name: str, source: CostSource, options: argparse.Namespace, limit: float | None, objective: Objective
) -> list[Problem]:
    """What is asked of a schedule, for each number of stages and placement that the options leave open."""
    chunks = options.stages_per_rank or source.stages_per_rank
    return [
        Problem(
            source.ranks,
            source.microbatches,
            stages,
            shape,
            source.costs(stages),
            per_rank(limit, source.ranks),
            source.vocabulary,
            objective=objective,
            text=MemoryText(source.units),
        )
        for stages, shape in stages_and_placements(name, chunks, options.placement)
    ]
