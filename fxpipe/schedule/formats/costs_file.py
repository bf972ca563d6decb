"""Costs as a JSON file, in the form in which a saved pipeline's plan.json holds them under ``costs``::

    {"stages": [{"forward": 1.0, "backward": 1.1, "weight": 0.9,
                 "saved_activations": 64, "saved_for_weight": 32}, …],
     "edges": [{"source": {"stage": 0, "phase": "F"}, "target": {"stage": 1, "phase": "F"},
                "bytes": 16, "seconds": 0.1, "inter_seconds": 0.4}, …],
     "ranks_per_machine": 8}

Times in any one unit, memory in any one unit; the fields are those of ``StageCost``, ``Edge`` and ``Costs``.
Only the times of stages are required: memory, ``bytes`` and ``seconds`` are 0 by default; without ``edges``
the stages are a chain; without ``ranks_per_machine`` there is one machine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fxpipe.errors import ScheduleError
from fxpipe.schedule.check import check_costs
from fxpipe.schedule.costs import Costs, chain
from fxpipe.strict import MEBIBYTE, parse_json, read_text, refused, structure

MOST_BYTES = 8 * MEBIBYTE


def read_costs(path: Path, seconds: float = 0.0, inter_seconds: float | None = None) -> Costs:
    """Read the costs from a file.

    seconds, inter_seconds: the time of each message within a machine and between two, if the file has no
        edges.
    Raises ScheduleError, naming the file and the field, if the file holds no valid costs.
    """
    with refused(ScheduleError, f"{path} holds no valid costs:", "docs/simulate.md describes the fields."):
        data = parse_json(read_text(path, MOST_BYTES))
        is_chain = isinstance(data, dict) and "edges" not in data
        costs = structure({**data, "edges": []} if is_chain else data, Costs)
        if is_chain:
            costs = replace(costs, edges=chain(costs.stages, seconds, 0.0, inter_seconds).edges)
        check_costs(costs)
    return costs
