"""The warm-up of a step: the forwards that a rank may run before it knows that the last update was right.

With post-validation each rank updates behind its own ops and begins the next step at once.  Until the verdict
on the gradients of all ranks has come, it runs only ops of its warm-up, so that a wrong update costs no more
than these forwards, which are run again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from fxpipe.schedule.costs import Edge
from fxpipe.schedule.ops import Color, Op, OpKind, Phase, Schedule
from fxpipe.schedule.simulation.run_loop import RunLoop


def warm_up_lengths(schedule: Schedule, edges: Iterable[Edge]) -> tuple[int, ...]:
    """Per rank the number of ops at the beginning of its order that are its warm-up.

    The warm-ups are the longest for which each op is an F that needs, by ``edges``, values of ops in warm-ups
    alone: then no rank needs anything of a rank that waits for its verdict.  In a schedule whose ranks block
    each other they are the ops that could run.
    """
    sources = defaultdict[int, list[Color]](list)
    for edge in edges:
        if edge.target.phase is Phase.F:
            sources[edge.target.stage].append(edge.source)
    lengths, done = [0] * schedule.ranks, set[tuple[Color, int]]()
    loop = RunLoop[tuple[Color, int]](schedule.ranks)

    def missing_for(op: Op) -> tuple[Color, int] | None:
        """What is missing for an op, if anything."""
        values = ((source, op.microbatch) for source in sources[op.stage])
        return next((value for value in values if value not in done), None)

    def advance(rank: int) -> tuple[Color, int] | None:
        for op in schedule.order[rank][lengths[rank] :]:
            if op.kind is not OpKind.F:
                return None
            missing = missing_for(op)
            if missing is not None:
                return missing
            value = Color(op.stage, Phase.F), op.microbatch
            lengths[rank] += 1
            done.add(value)
            loop.happened(value)
        return None

    loop.run(advance)
    return tuple(lengths)
