"""The vocabulary of schedules: a schedule is data, per rank a tuple of ops.

As text an op is ``F2.5`` (the forward of stage 2, microbatch 5), an order one line a rank::

    F0.0 F0.1 BW0.0 BW0.1
    F1.0 BW1.0 F1.1 BW1.1
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from fxpipe.errors import ScheduleError, number_of
from fxpipe.schedule.stages import Vocabulary
from fxpipe.strict import shown


class Phase(StrEnum):
    """The purpose of a node.  One microbatch passes through a stage in this order."""

    F = "F"  # forward
    B = "B"  # backward, gradients of activations
    W = "W"  # backward, gradients of parameters

    __hash__ = str.__hash__  # that of an Enum is written in Python


@dataclass(frozen=True, slots=True, order=True)
class Color:
    stage: int
    phase: Phase


def arrival(user: Color) -> Color:
    """The section with which a value from another stage arrives, if section ``user`` needs it.

    Values for W arrive with B, even if B has no ops: W then waits for its own B alone, and can run whenever
    its rank is free.
    """
    return Color(user.stage, Phase.B) if user.phase is Phase.W else user


class OpKind(StrEnum):
    F = "F"  # forward
    B = "B"  # input gradient
    W = "W"  # weight gradient
    BW = "BW"  # both as one unit: its results leave when all of it is done (classical backward)

    __hash__ = str.__hash__


PHASES: dict[OpKind, tuple[Phase, ...]] = {
    OpKind.F: (Phase.F,),
    OpKind.B: (Phase.B,),
    OpKind.W: (Phase.W,),
    OpKind.BW: (Phase.B, Phase.W),
}
"""The sections that an op of a kind runs."""


@dataclass(frozen=True, slots=True)
class Op:
    """One entry of a schedule.  As text: ``F2.5`` is the forward of stage 2, microbatch 5."""

    kind: OpKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


RankOps = tuple[tuple[Op, ...], ...]
"""The ops of each rank, in order."""


Objective = Literal["makespan", "span", "period"]
"""The span is the longest of the ranks' times from their first op's start to their last op's end, the period
the seconds a step of many steps with post-validation (``simulation/steps.py``)."""

Validation = Literal["barrier", "post"]
"""When the ranks update: when the gradients of all are known to be right (``barrier``), or each behind its
own ops, and the verdict on all gradients comes later (``post``)."""

VALIDATIONS: tuple[Validation, ...] = ("barrier", "post")


Activation = tuple[int, int, Phase]
"""Stage, microbatch, and the phase (B or W) for which F saved it."""


class Direction(StrEnum):
    OUT = "offload"
    IN = "reload"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Offload or reload of the activation that a stage's F saved for one microbatch and ``user`` (B or W).

    It starts when op number ``begin - 1`` of the rank's order has ended; op number ``end`` waits for its end.
    Between two ops, reloads start when the offloads have ended, since they may need the memory.
    """

    direction: Direction
    stage: int
    microbatch: int
    user: Phase
    begin: int
    end: int

    @property
    def activation(self) -> Activation:
        """The activation that is moved."""
        return self.stage, self.microbatch, self.user

    def __str__(self) -> str:
        return f"{self.direction} {self.user}{self.stage}.{self.microbatch}"


@dataclass(frozen=True, repr=False)
class Schedule:
    """``placement[stage]`` is the rank of a stage, ``order[rank]`` the ops of a rank, in order.

    ``vocabulary``: the stages that are not the model's own.  ``transfers``: offloads and reloads, in
    the order of their starts.
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    order: RankOps
    vocabulary: Vocabulary | None = None
    transfers: tuple[Transfer, ...] = ()

    def __repr__(self) -> str:
        """The text has no ops, of which there may be a million."""
        ops = sum(map(len, self.order))
        things = {"rank": self.ranks, "stage": self.stages, "microbatch": self.microbatches, "op": ops}
        return f"Schedule({self.name}: {', '.join(number_of(n, thing) for thing, n in things.items())})"

    @property
    def ranks(self) -> int:
        return len(self.order)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def joined(self) -> frozenset[int]:
        """The stages that run every B and W as one op."""
        apart = {op.stage for ops in self.order for op in ops if op.kind in (OpKind.B, OpKind.W)}
        return frozenset(range(self.stages)) - apart

    @property
    def model_stages(self) -> tuple[int, ...]:
        """The stages that are no shards of the vocabulary."""
        return tuple(stage for stage in range(self.stages) if not self.is_vocabulary(stage))

    def is_vocabulary(self, stage: int) -> bool:
        vocabulary = self.vocabulary
        return (
            vocabulary is not None
            and not vocabulary.embedding_shards <= stage < self.stages - vocabulary.output_shards
        )


#: Of all stages and microbatches of a step: a plan of more is larger than a file of one may be.
MOST_FORWARDS = 1_000_000
NUMBER = "[0-9]{1,9}"  #: of a stage or a microbatch, as text
_OP = re.compile(rf"(F|BW|B|W)({NUMBER})\.({NUMBER})")


def parse_op(text: str) -> Op:
    """Parse an op such as ``"F2.5"``.  Raises ScheduleError for any other text."""
    match = _OP.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"{shown(text)} is no op: write kind, stage, dot, microbatch, such as F2.5 or BW0.3, with "
            "numbers of at most 9 digits"
        )
    return Op(OpKind(match[1]), int(match[2]), int(match[3]))


def parse_ops(line: str) -> tuple[Op, ...]:
    """Parse ops separated by spaces.  Raises ScheduleError for the first word that is no op."""
    return tuple(parse_op(word[0]) for word in re.finditer(r"\S+", line))


def parse_order(text: str) -> RankOps:
    """One line a rank (empty lines are skipped); the inverse of :func:`order_text`."""
    return tuple(parse_ops(line) for line in text.splitlines() if line.strip())


def order_text(order: RankOps) -> str:
    """One line a rank."""
    return "\n".join(" ".join(map(str, ops)) for ops in order)
