"""The earliest round in which each op of a schedule can run, if every op takes one round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fxpipe.schedule.costs import Edge
from fxpipe.schedule.ops import PHASES, Color, Op, Schedule, arrival
from fxpipe.schedule.simulation.run_loop import RunLoop


def levels(schedule: Schedule, edges: Sequence[Edge]) -> dict[Op, int]:
    """Per op the round in which it runs if every op takes one round and starts as early as possible.

    An op's level is above the levels of the ops before it on its rank and of the ops whose results it needs.
    Ops that are deadlocked have no level.
    """
    sources: defaultdict[Color, list[Color]] = defaultdict(list)
    for edge in edges:
        sources[arrival(edge.target)].append(edge.source)
    value_level: dict[tuple[Color, int], int] = {}
    op_level: dict[Op, int] = {}
    at, level = [0] * schedule.ranks, [0] * schedule.ranks
    loop = RunLoop[tuple[Color, int]](schedule.ranks)

    def advance(rank: int) -> tuple[Color, int] | None:
        while at[rank] < len(schedule.order[rank]):
            op = schedule.order[rank][at[rank]]
            colors = [Color(op.stage, phase) for phase in PHASES[op.kind]]
            inputs = [(c, op.microbatch) for color in colors for c in sources[color] if c not in colors]
            for value in inputs:
                if value not in value_level:
                    return value
            op_level[op] = level[rank] = 1 + max([level[rank], *(value_level[value] for value in inputs)])
            at[rank] += 1
            for color in colors:
                value_level[color, op.microbatch] = level[rank]
                loop.happened((color, op.microbatch))
        return None

    loop.run(advance)
    return op_level
