"""Costs as a JSON file, in the form in which a saved pipeline's plan.json holds them under ``costs``::

    {"stages": [{"forward": 1.0, "backward": 1.1, "weight": 0.9, "saved": 64, "kept": 32}, …],
     "edges": [{"source": {"stage": 0, "phase": "F"}, "target": {"stage": 1, "phase": "F"},
                "bytes": 16, "seconds": 0.1}, …]}

Times in any one unit, memory in any one unit.  ``saved``, ``kept``, ``bytes`` and ``seconds`` are 0 where
they are left out; without ``edges`` the stages are a chain.  A stage may have ``away`` and
``away_for_weight``: what of ``saved`` may leave the rank until B, and until W.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path

import cattrs

from fxpipe.errors import ScheduleError
from fxpipe.schedule.costs import Costs, Edge, Link, StageCost, chain

_converter = cattrs.Converter(forbid_extra_keys=True)


@dataclass(frozen=True)
class _File:
    stages: tuple[StageCost, ...]
    edges: tuple[Edge, ...] | None = None
    link: Link | None = None


def read_costs(path: Path, seconds: float = 0.0) -> Costs:
    """The costs of a file.

    seconds: one transfer, for a file without edges.
    Raises ScheduleError, naming the file and the place in it, where it holds none.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ScheduleError(f"{path} is no readable JSON file: {error}") from error
    if not isinstance(data, dict):
        raise ScheduleError(f"{path} holds no costs: it must be an object with stages and edges")
    try:
        file = _converter.structure(data, _File)
    except cattrs.BaseValidationError as error:
        raise ScheduleError(f"{path} holds no costs: {cattrs.transform_error(error)[0]}") from error
    if not file.stages:
        raise ScheduleError(f"{path} holds no costs: it has no stages")
    for number, stage in enumerate(file.stages):
        _check(stage, f"{path}: stages[{number}]")
    if file.link is not None:
        _check(file.link, f"{path}: link")
    if file.edges is None:
        return replace(chain(file.stages, seconds), link=file.link)
    for number, edge in enumerate(file.edges):
        _check(edge, f"{path}: edges[{number}]")
    return Costs(file.stages, file.edges, file.link)


def write_costs(costs: Costs, path: Path) -> None:
    path.write_text(json.dumps(_converter.unstructure(costs), indent=1) + "\n")


def _check(entry: StageCost | Edge | Link, where: str) -> None:
    for name in (field.name for field in fields(entry)):
        number = getattr(entry, name)
        if isinstance(number, int | float) and not (isfinite(number) and number >= 0):
            raise ScheduleError(f"{where}: {name} is {number}; it must be finite and not negative")
