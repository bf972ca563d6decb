"""The roles of ops in pictures: F, B, W or BW of a stage, or the passes S and T of a vocabulary stage."""

from __future__ import annotations

from enum import StrEnum

from fxpipe.schedule.ops import Op, OpKind, Phase, Schedule
from fxpipe.viz.palette import AFTER_BARRIER, BEFORE_BARRIER, PHASES


class Role(StrEnum):
    F = "F"
    B = "B"
    W = "W"
    BW = "BW"
    S = "S"
    T = "T"


MEANING: dict[str, str] = {
    Role.F: "forward",
    Role.B: "input gradient",
    Role.W: "weight gradient",
    Role.BW: "both gradients",
    Role.S: "vocabulary, before its barrier",
    Role.T: "vocabulary, after its barrier",
}
"""Also by Phase or OpKind: these are the same letters."""


def role(op: Op, schedule: Schedule) -> Role:
    if not schedule.is_vocabulary(op.stage):
        return Role(op.kind)
    return Role.S if op.kind is OpKind.F else Role.T


def color(shown: Role) -> str:
    """The color of a role; BW has the color of B."""
    beside = {Role.BW: PHASES[Phase.B], Role.S: BEFORE_BARRIER, Role.T: AFTER_BARRIER}
    return beside[shown] if shown in beside else PHASES[Phase(shown)]
