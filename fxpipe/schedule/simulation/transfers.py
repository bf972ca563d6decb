"""The transfers of a schedule: their bytes and seconds, and the order in which a link carries them."""

from __future__ import annotations

from collections import defaultdict

from fxpipe.schedule.costs import Costs, StageCost
from fxpipe.schedule.ops import Direction, Phase, Schedule


def offload_bytes(cost: StageCost, user: Phase) -> float:
    """Bytes that a stage can offload for one microbatch until its B or its W."""
    return cost.offloadable if user is Phase.B else cost.offloadable_for_weight


def link_queues(schedule: Schedule, costs: Costs) -> tuple[tuple[int, ...], ...]:
    """The positions in ``schedule.transfers`` of what each link carries in each direction, in order."""
    if costs.link is None:
        return ()
    queues: defaultdict[tuple[int, Direction], list[int]] = defaultdict(list)
    for k, transfer in enumerate(schedule.transfers):
        rank = schedule.placement[transfer.stage]
        queues[rank // costs.link.ranks, transfer.direction].append(k)
    return tuple(tuple(queue) for queue in queues.values())
