"""Costs as a JSON file, in the form in which a saved pipeline's plan.json holds them under ``costs``::

    {"stages": [{"forward": 1.0, "backward": 1.1, "weight": 0.9,
                 "saved_activations": 64, "saved_for_weight": 32}, …],
     "edges": [{"source": {"stage": 0, "phase": "F"}, "target": {"stage": 1, "phase": "F"},
                "bytes": 16, "seconds": 0.1, "inter_seconds": 0.4}, …],
     "ranks_per_machine": 8}

Times in any one unit, memory in any one unit; the fields are those of ``StageCost``, ``Edge`` and ``Costs``.
Only the times of stages are required: memory, ``bytes`` and ``seconds`` are 0 by default; without ``edges``
the stages are a chain; without ``ranks_per_machine`` there is one machine.  The older names ``saved``,
``kept``, ``away`` and ``away_for_weight`` are read too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from fxpipe.errors import ScheduleError
from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.costs import Costs, Edge, Link, StageCost, chain
from fxpipe.strict import MEBIBYTE, Misfit, misfit, parse_json, read_text, structure, unstructure

MOST_BYTES = 8 * MEBIBYTE


@dataclass(frozen=True)
class _File:
    stages: tuple[StageCost, ...]
    edges: tuple[Edge, ...] | None = None
    link: Link | None = None
    ranks_per_machine: int | None = None


def read_costs(path: Path, seconds: float = 0.0, inter_seconds: float | None = None) -> Costs:
    """Read the costs from a file.

    seconds, inter_seconds: the time of each message within a machine and between two, if the file has no
        edges.
    Raises ScheduleError, naming the file and the field, if the file holds no valid costs.
    """
    try:
        file = structure(parse_json(read_text(path, MOST_BYTES)), _File)
        edges = chain(file.stages, seconds, 0.0, inter_seconds).edges if file.edges is None else file.edges
        costs = Costs(file.stages, edges, file.link, file.ranks_per_machine)
        check_costs(costs)
    except Misfit as error:
        raise ScheduleError(
            f"{path} holds no valid costs: {error}. docs/simulate.md describes the fields."
        ) from error
    return costs


def write_costs(costs: Costs, path: Path) -> None:
    path.write_text(json.dumps(unstructure(costs), indent=1) + "\n")


def check_costs(costs: Costs, path: str = "") -> None:
    """Raise Misfit unless all times and bytes are 0 or more, and edges join existing stages without a cycle.

    path: of the costs in their file, such as ``costs.``.
    """
    if not costs.stages:
        raise Misfit("is empty", f"{path}stages")
    for k, stage in enumerate(costs.stages):
        _check_numbers(stage, f"{path}stages[{k}]")
    for k, edge in enumerate(costs.edges):
        _check_numbers(edge, f"{path}edges[{k}]")
        for name, end in (("source", edge.source), ("target", edge.target)):
            if not 0 <= end.stage < len(costs.stages):
                wanted = f"from 0 to {len(costs.stages) - 1}, one of the stages"
                raise misfit(f"{path}edges[{k}].{name}.stage", end.stage, wanted)
    if costs.link is not None:
        _check_numbers(costs.link, f"{path}link")
        if costs.link.ranks < 1:
            raise misfit(f"{path}link.ranks", costs.link.ranks, "1 or more")
    size = costs.ranks_per_machine
    if size is not None and size < 1:
        raise misfit(f"{path}ranks_per_machine", size, "1 or more")
    try:
        lower_bound(costs, tuple(range(len(costs.stages))), 1)
    except ScheduleError as error:
        raise Misfit(f"are invalid: {error}", f"{path}edges") from error


def _check_numbers(entry: StageCost | Edge | Link, path: str) -> None:
    for field in fields(entry):
        number = getattr(entry, field.name)
        if isinstance(number, int | float) and number < 0:
            raise misfit(f"{path}.{field.name}", number, "0 or more")
