"""The vocabulary of schedules: a schedule is data, per rank a tuple of ops."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class OpKind(StrEnum):
    F = "F"  # forward
    B = "B"  # input gradient
    W = "W"  # weight gradient
    BW = "BW"  # both as one unit: its results leave when all of it is done (classical backward)


@dataclass(frozen=True, slots=True)
class Op:
    """One entry of a schedule.  As text: ``F2.5`` is the forward of stage 2, microbatch 5."""

    kind: OpKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """``placement[stage]`` is the rank that holds the stage; ``order[rank]`` what that rank runs, in order."""

    name: str
    placement: tuple[int, ...]
    microbatches: int
    order: tuple[tuple[Op, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.order)

    @property
    def stages(self) -> int:
        return len(self.placement)
