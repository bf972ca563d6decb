"""The transfers of a schedule: their bytes and seconds, and the order in which a link carries them."""

from __future__ import annotations

from collections import defaultdict

from fxpipe.errors import ScheduleError
from fxpipe.ir.graph import Phase
from fxpipe.schedule.costs import Costs, StageCost
from fxpipe.schedule.ops import PHASES, Activation, Direction, Schedule, Transfer


def offload_bytes(cost: StageCost, user: Phase) -> float:
    """Bytes that a stage can offload for one microbatch until its B or its W."""
    return cost.offloadable if user is Phase.B else cost.offloadable_for_weight


def transfer_seconds(transfer: Transfer, costs: Costs) -> float:
    assert costs.link is not None
    return costs.link.seconds * offload_bytes(costs.stages[transfer.stage], transfer.user)


def link_queues(schedule: Schedule, costs: Costs) -> tuple[tuple[int, ...], ...]:
    """Per link and direction, the positions of its transfers in ``schedule.transfers``, in order."""
    if costs.link is None:
        return ()
    found: defaultdict[tuple[int, Direction], list[int]] = defaultdict(list)
    for k, transfer in enumerate(schedule.transfers):
        rank = schedule.placement[transfer.stage]
        found[rank // costs.link.ranks, transfer.direction].append(k)
    return tuple(tuple(queue) for queue in found.values())


def check_transfers(schedule: Schedule, costs: Costs) -> None:
    """Raise ScheduleError, naming the transfer, unless each activation is offloaded once after its F, and
    reloaded once, after the offload has ended and before its user starts."""
    if not schedule.transfers:
        return
    if costs.link is None:
        raise ScheduleError(f"schedule {schedule.name} has transfers, but the costs have no link")
    position = {
        (op.stage, phase, op.microbatch): k
        for ops in schedule.order
        for k, op in enumerate(ops)
        for phase in PHASES[op.kind]
    }
    found: defaultdict[Activation, dict[Direction, Transfer]] = defaultdict(dict)
    for transfer in schedule.transfers:
        if transfer.user is Phase.F:
            raise ScheduleError(f"schedule {schedule.name}: the user of {transfer} must be B or W")
        if transfer.direction in found[transfer.activation]:
            raise ScheduleError(f"schedule {schedule.name} has {transfer} twice")
        if (transfer.stage, transfer.user, transfer.microbatch) not in position:
            raise ScheduleError(f"schedule {schedule.name}: {transfer} is for an op that no rank runs")
        found[transfer.activation][transfer.direction] = transfer
    for (stage, microbatch, user), both in found.items():
        first, last = position[stage, Phase.F, microbatch], position[stage, user, microbatch]
        if len(both) < len(Direction):
            other = Direction.IN if Direction.OUT in both else Direction.OUT
            raise ScheduleError(f"schedule {schedule.name}: {next(iter(both.values()))} has no {other}")
        out, back = both[Direction.OUT], both[Direction.IN]
        if not first < out.begin <= out.end <= back.begin <= back.end <= last:
            raise ScheduleError(
                f"schedule {schedule.name}: {out} from op {out.begin} to {out.end} and {back} from op "
                f"{back.begin} to {back.end} of the rank must lie between ops {first} and {last}, in this "
                "order"
            )
