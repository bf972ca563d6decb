"""Checks that a schedule is complete: every op once, on the rank of its stage, F before B before W."""

from __future__ import annotations

from collections import defaultdict
from itertools import count

from fxpipe.errors import ScheduleError
from fxpipe.schedule.dependencies import SECTIONS_PER_STAGE, op_of_value, sections
from fxpipe.schedule.ops import Op, Schedule


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
            raise _error(
                schedule, f"stage {stage} is placed on rank {rank}, but there are {schedule.ranks} ranks"
            )


def _check_holder(schedule: Schedule, rank: int, op: Op) -> None:
    if not (0 <= op.stage < schedule.stages and 0 <= op.microbatch < schedule.microbatches):
        raise _error(
            schedule,
            f"rank {rank} runs {op}, but there are {schedule.stages} stages and "
            f"{schedule.microbatches} microbatches, both counted from 0",
        )
    holder = schedule.placement[op.stage]
    if holder != rank:
        raise _error(schedule, f"rank {rank} runs {op}, but stage {op.stage} is placed on rank {holder}")


def _error(schedule: Schedule, what: str) -> ScheduleError:
    return ScheduleError(f"schedule {schedule.name}: {what}")
