"""Transfers of a schedule: what they are of, how long they take, in which order a link carries them."""

from __future__ import annotations

from collections import defaultdict

from fxpipe.errors import ScheduleError
from fxpipe.ir.graph import Phase
from fxpipe.schedule.costs import Costs, StageCost
from fxpipe.schedule.ops import PHASES, Activation, Direction, Schedule, Transfer


def away_bytes(cost: StageCost, user: Phase) -> float:
    """What may leave a stage's rank until its B or its W."""
    return cost.away if user is Phase.B else cost.away_for_weight


def transfer_seconds(transfer: Transfer, costs: Costs) -> float:
    assert costs.link is not None
    return costs.link.seconds * away_bytes(costs.stages[transfer.stage], transfer.user)


def lanes(schedule: Schedule, costs: Costs) -> tuple[tuple[int, ...], ...]:
    """The transfers, by position, that each direction of each link carries."""
    if costs.link is None:
        return ()
    found: defaultdict[tuple[int, Direction], list[int]] = defaultdict(list)
    for k, transfer in enumerate(schedule.transfers):
        rank = schedule.placement[transfer.stage]
        found[rank // costs.link.ranks, transfer.direction].append(k)
    return tuple(tuple(lane) for lane in found.values())


def check_transfers(schedule: Schedule, costs: Costs) -> None:
    """Raise ScheduleError, naming the transfer, unless each activation leaves once behind its F, and comes
    back once, after it is away and before its user."""
    if not schedule.transfers:
        return
    if costs.link is None:
        raise ScheduleError(f"schedule {schedule.name} has transfers, and the costs have no link")
    position = {
        (op.stage, phase, op.microbatch): k
        for ops in schedule.order
        for k, op in enumerate(ops)
        for phase in PHASES[op.kind]
    }
    found: defaultdict[Activation, dict[Direction, Transfer]] = defaultdict(dict)
    for transfer in schedule.transfers:
        if transfer.user is Phase.F or transfer.direction in found[transfer.activation]:
            raise ScheduleError(f"schedule {schedule.name}: {transfer} is for no gradient, or there twice")
        if (transfer.stage, transfer.user, transfer.microbatch) not in position:
            raise ScheduleError(f"schedule {schedule.name}: {transfer} is for an op that no rank runs")
        found[transfer.activation][transfer.direction] = transfer
    for (stage, microbatch, user), both in found.items():
        first, last = position[stage, Phase.F, microbatch], position[stage, user, microbatch]
        if len(both) < len(Direction):
            raise ScheduleError(f"schedule {schedule.name}: {next(iter(both.values()))} goes one way alone")
        out, back = both[Direction.OUT], both[Direction.IN]
        if not first < out.begin <= out.end <= back.begin <= back.end <= last:
            raise ScheduleError(
                f"schedule {schedule.name}: {out} from op {out.begin} to {out.end} and {back} from op "
                f"{back.begin} to {back.end} of the rank do not lie between ops {first} and {last}, in this "
                "order"
            )
