"""Checks that a schedule is complete: every op once, on the rank of its stage, F before B before W."""

from __future__ import annotations

from collections import defaultdict
from itertools import count

from fxpipe.errors import ScheduleError, number_of
from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.dependencies import SECTIONS_PER_STAGE, op_of_value, sections
from fxpipe.schedule.ops import PHASES, Activation, Direction, Op, Phase, Schedule, Transfer
from fxpipe.strict import Mismatch, require


def check(schedule: Schedule) -> None:
    """Raise ScheduleError, naming op and rank, if an op is missing, repeated, misplaced or too early.

    A stage's backward of a microbatch is either B and W or one BW.  Deadlocks between the ranks are not
    checked here: the simulator and the deadlock proof find them.
    """
    _check_placement(schedule)
    microbatches, table = schedule.microbatches, sections(schedule.stages)
    sections_in_all = SECTIONS_PER_STAGE * schedule.stages * microbatches
    # One byte per section; a dict if there are too few ops for all sections, to bound the memory.
    complete = sections_in_all <= 2 * sum(map(len, schedule.order))
    done: bytearray | defaultdict[int, int] = bytearray(sections_in_all) if complete else defaultdict(int)
    for rank, ops in enumerate(schedule.order):
        for op in ops:
            _check_holder(schedule, rank, op)
            for section in table[op.kind][op.stage]:
                value = section * microbatches + op.microbatch
                if done[value]:
                    again = op_of_value(value, microbatches)
                    raise _error(schedule, f"rank {rank} runs {again} a second time, as {op}")
                if section % SECTIONS_PER_STAGE and not done[value - microbatches]:
                    before = op_of_value(value - microbatches, microbatches)
                    raise _error(schedule, f"rank {rank} runs {op} before {before}, which it needs")
                done[value] = 1
    if isinstance(done, bytearray):
        missing = done.find(0)
    else:
        missing = next(value for value in count() if not done[value])
    if missing >= 0:
        op = op_of_value(missing, microbatches)
        raise _error(schedule, f"rank {schedule.placement[op.stage]} never runs {op}")


def _check_placement(schedule: Schedule) -> None:
    if schedule.microbatches < 1 or not schedule.placement:
        raise _error(schedule, "needs at least one microbatch and one stage")
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.ranks:
            ranks = number_of(schedule.ranks, "rank")
            what = f"stage {stage} is placed on rank {rank}, but the schedule has {ranks}"
            raise _error(schedule, what)


def _check_holder(schedule: Schedule, rank: int, op: Op) -> None:
    if not (0 <= op.stage < schedule.stages and 0 <= op.microbatch < schedule.microbatches):
        raise _error(
            schedule,
            f"rank {rank} runs {op}, but the schedule has {number_of(schedule.stages, 'stage')} and "
            f"{number_of(schedule.microbatches, 'microbatch')}, both counted from 0",
        )
    holder = schedule.placement[op.stage]
    if holder != rank:
        raise _error(schedule, f"rank {rank} runs {op}, but stage {op.stage} is placed on rank {holder}")


def _error(schedule: Schedule, what: str) -> ScheduleError:
    return ScheduleError(f"schedule {schedule.name}: {what}")


def check_whole(schedule: Schedule, costs: Costs) -> None:
    """Raise ScheduleError if an op or a transfer is missing, repeated or misplaced."""
    check(schedule)
    check_transfers(schedule, costs)


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
    transfers: defaultdict[Activation, dict[Direction, Transfer]] = defaultdict(dict)
    for transfer in schedule.transfers:
        if transfer.user is Phase.F:
            raise _error(schedule, f"the user of {transfer} must be B or W")
        if transfer.direction in transfers[transfer.activation]:
            raise ScheduleError(f"schedule {schedule.name} has {transfer} twice")
        if (transfer.stage, transfer.user, transfer.microbatch) not in position:
            raise _error(schedule, f"{transfer} is for an op that no rank runs")
        transfers[transfer.activation][transfer.direction] = transfer
    for (stage, microbatch, user), directions in transfers.items():
        first, last = position[stage, Phase.F, microbatch], position[stage, user, microbatch]
        if len(directions) < len(Direction):
            other = Direction.IN if Direction.OUT in directions else Direction.OUT
            raise _error(schedule, f"{next(iter(directions.values()))} has no {other}")
        out, back = directions[Direction.OUT], directions[Direction.IN]
        if not first < out.begin <= out.end <= back.begin <= back.end <= last:
            raise _error(
                schedule,
                f"{out} from op {out.begin} to {out.end} and {back} from op {back.begin} to {back.end} of "
                f"the rank must lie between ops {first} and {last}, in this order",
            )


def check_costs(costs: Costs, path: str = "") -> None:
    """Raise Mismatch unless edges join existing stages without a cycle.

    path: of the costs in their file, such as ``costs.``.
    """
    number = len(costs.exchanges)
    require(f"{path}exchanges", number, number in (0, len(costs.stages)), "one of each stage, or none")
    for k, edge in enumerate(costs.edges):
        for name, end in (("source", edge.source), ("target", edge.target)):
            wanted = f"from 0 to {len(costs.stages) - 1}, one of the stages"
            fits = 0 <= end.stage < len(costs.stages)
            require(f"{path}edges[{k}].{name}.stage", end.stage, fits, wanted)
    try:
        lower_bound(costs, tuple(range(len(costs.stages))), 1)
    except ScheduleError as error:
        raise Mismatch(f"are invalid: {error}", f"{path}edges") from error
