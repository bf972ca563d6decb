"""The instructions of a rank: compute, post receives, wait for them, send.

A *message* has the values of one edge for one microbatch, where the edge's stages lie on different
ranks.  A *channel* is an ordered pair of ranks; its messages travel in the order in which they are
sent, and receives are posted in that same order.

A *collective* replaces the messages of many edges between all ranks.

A *transfer* offloads an activation that F saved, or reloads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from fxpipe.schedule.costs import Edge
from fxpipe.schedule.ops import Color, Op, Transfer


class CollectiveKind(StrEnum):
    BROADCAST = "broadcast"  # one section's values to a section on every rank
    REDUCE = "reduce"  # the sum of a value of a section on every rank to one section
    ALL_GATHER = "all-gather"  # a value of a section on every rank to a section on every rank


@dataclass(frozen=True, slots=True)
class Collective:
    """A message from or to all ranks.  ``sources`` and ``targets``: one section, or one on every rank in the
    ranks' order.

    ``number`` identifies the collective.
    """

    kind: CollectiveKind
    number: int
    sources: tuple[Color, ...]
    targets: tuple[Color, ...]

    @property
    def group(self) -> int:
        """The number of its communicator.  Sums, which are several operations, have one of their own."""
        return int(self.kind is CollectiveKind.REDUCE)

    def __hash__(self) -> int:
        return self.number  # and not of all sections, whose number grows with the ranks

    def __str__(self) -> str:
        source, target = self.sources[0], self.targets[0]
        return f"{self.kind} {source.phase}{source.stage} … -> {target.phase}{target.stage} …"


@dataclass(frozen=True, slots=True)
class _Told:
    """An instruction with its ``text`` for messages and golden files, in which ``{0}`` is the instruction."""

    text: ClassVar[str]

    def __str__(self) -> str:
        return self.text.format(self)


@dataclass(frozen=True, slots=True)
class StartCollective(_Told):
    """Join a collective; does not block."""

    collective: Collective
    microbatch: int
    text = "join {0.collective}, microbatch {0.microbatch}"


@dataclass(frozen=True, slots=True)
class WaitCollective(_Told):
    """Block until a collective has delivered its values."""

    collective: Collective
    microbatch: int
    text = "collect {0.collective}, microbatch {0.microbatch}"


@dataclass(frozen=True, slots=True)
class Compute(_Told):
    op: Op
    text = "compute {0.op}"


@dataclass(frozen=True, slots=True)
class Message:
    """The values of an edge for a microbatch."""

    edge: Edge
    microbatch: int

    def __str__(self) -> str:
        source, target = self.edge.source, self.edge.target
        values = f"{source.phase}{source.stage} -> {target.phase}{target.stage}"
        return f"{values}, microbatch {self.microbatch}"


@dataclass(frozen=True, slots=True)
class _OnChannel(_Told):
    """An instruction on ``messages`` of one channel, in its order."""

    messages: tuple[Message, ...]

    @property
    def named(self) -> str:
        return " and ".join(map(str, self.messages))


@dataclass(frozen=True, slots=True)
class PostRecv(_OnChannel):
    """Allocate the buffers of messages and start to receive them, as one operation; does not block."""

    text = "post {0.named}"


@dataclass(frozen=True, slots=True)
class Wait(_OnChannel):
    """Block until the messages of a post have arrived."""

    text = "wait {0.named}"


@dataclass(frozen=True, slots=True)
class Send(_OnChannel):
    """Start to send messages, as one operation; does not block."""

    text = "send {0.named}"


@dataclass(frozen=True, slots=True)
class StartTransfer(_Told):
    """Start to offload or reload an activation; does not block."""

    transfer: Transfer
    text = "begin {0.transfer}"


@dataclass(frozen=True, slots=True)
class WaitTransfer(_Told):
    """Block until an activation is offloaded and its memory free, or reloaded and ready for use."""

    transfer: Transfer
    text = "end {0.transfer}"


@dataclass(frozen=True, slots=True)
class _OfBucket(_Told):
    """An instruction on the bucket of gradients and their parameters that has the number ``bucket``."""

    bucket: int


@dataclass(frozen=True, slots=True)
class GatherParameters(_OfBucket):
    """Start to get the rows of a bucket's parameters that other replicas have updated; does not block."""

    text = "gather the parameters of bucket {0.bucket}"


@dataclass(frozen=True, slots=True)
class WaitParameters(_OfBucket):
    """Block until all rows of a bucket's parameters are there."""

    text = "wait for the parameters of bucket {0.bucket}"


@dataclass(frozen=True, slots=True)
class FreeParameters(_OfBucket):
    """Free the rows of a bucket's parameters that other replicas own."""

    text = "free the parameters of bucket {0.bucket}"


@dataclass(frozen=True, slots=True)
class SumOverLanes(_OfBucket):
    """Sum a bucket of gradients over the lanes, as ops between lanes do.  ``lanes``: the arguments that name
    a group of them, none for all."""

    lanes: tuple[int, ...] = ()
    text = "sum over the lanes bucket {0.bucket}"


@dataclass(frozen=True, slots=True)
class ReduceGradients(_OfBucket):
    """Start to sum a bucket of gradients over the replicas; does not block."""

    text = "sum over the replicas bucket {0.bucket}"


@dataclass(frozen=True, slots=True)
class WaitGradients(_Told):
    """Wait for the sums over the replicas."""

    text = "wait for the sums over the replicas"


@dataclass(frozen=True, slots=True)
class Validate(_Told):
    """Wait until all ranks know whether the last update of the parameters stands.  If it does not, it is
    undone, and the rank begins its program again."""

    text = "wait for the verdict on the last update"


@dataclass(frozen=True, slots=True)
class AllReduceGradient(_Told):
    """Sum the gradient of a parameter that several ranks hold; the first of ``ranks`` receives the others'
    and sends them the sum."""

    name: str
    ranks: tuple[int, ...]
    text = "all-reduce the gradient of {0.name}"


@dataclass(frozen=True, slots=True)
class DivideGradients(_Told):
    """Wait until all messages are sent; then divide the gradients by the count of the batch."""

    text = "divide the gradients"


Local = Compute | StartTransfer | WaitTransfer
"""Instructions that involve no other rank."""
AtEnd = WaitGradients | AllReduceGradient | DivideGradients
"""Instructions on the gradients of the batch, behind all others."""

OfBucket = GatherParameters | WaitParameters | FreeParameters | SumOverLanes | ReduceGradients
"""Instructions that involve this rank of the other replicas."""

Instruction = Local | PostRecv | Wait | Send | StartCollective | WaitCollective | OfBucket | Validate | AtEnd
Programs = tuple[tuple[Instruction, ...], ...]
"""The instructions of each rank, in order."""


def number_at_head(instructions: Sequence[Instruction]) -> int:
    """Count the gathers with which a step begins, before its functions."""
    return next((k for k, i in enumerate(instructions) if not isinstance(i, GatherParameters)), 0)
