"""A schedule to what each rank really does: compute, post receives, wait for them, send.

A *message* is what one edge carries for one microbatch, where the edge's stages lie on different
ranks.  A *channel* is an ordered pair of ranks; its messages travel in the order in which they are
sent, and receives are posted in that same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from fxpipe.errors import ScheduleError
from fxpipe.graph import Colour
from fxpipe.schedule.check import check
from fxpipe.schedule.costs import Edge
from fxpipe.schedule.ops import PHASES, Op, Schedule


@dataclass(frozen=True, slots=True)
class Compute:
    op: Op

    def __str__(self) -> str:
        return f"compute {self.op}"


@dataclass(frozen=True, slots=True)
class _Message:
    edge: Edge
    microbatch: int

    def __str__(self) -> str:
        source, target = self.edge.source, self.edge.target
        values = f"{source.phase}{source.stage} -> {target.phase}{target.stage}"
        return f"{type(self).__name__.lower()} {values}, microbatch {self.microbatch}"


@dataclass(frozen=True, slots=True)
class Post(_Message):
    """Make the buffer of a message and start to receive it; does not block."""


@dataclass(frozen=True, slots=True)
class Wait(_Message):
    """Go on when the message has arrived."""


@dataclass(frozen=True, slots=True)
class Send(_Message):
    """Start to send a message; does not block."""


Instruction = Compute | Post | Wait | Send
Programs = tuple[tuple[Instruction, ...], ...]
"""What each rank does, in order."""


def lower(schedule: Schedule, edges: tuple[Edge, ...]) -> Programs:
    """Before each compute the receives of the *next* one are posted, and those of its own waited for;
    after it its results are sent.

    Where a channel's messages are needed in another order than they are sent in, the ones sent before
    a needed one are posted together with it.  Edges within a rank give no instruction.  Raises
    ScheduleError where the schedule is not whole or two edges join the same two sections.
    """
    check(schedule)
    return _Lowering(schedule, edges).programs()


class _Lowering:
    def __init__(self, schedule: Schedule, edges: tuple[Edge, ...]) -> None:
        self.schedule = schedule
        self.outgoing: defaultdict[Colour, list[Edge]] = defaultdict(list)
        self.incoming: defaultdict[Colour, list[Edge]] = defaultdict(list)
        joined = set()
        for edge in edges:
            if (edge.source, edge.target) in joined:
                raise ScheduleError(
                    f"two edges from {edge.source.phase}{edge.source.stage} to "
                    f"{edge.target.phase}{edge.target.stage}: join what they carry in one"
                )
            joined.add((edge.source, edge.target))
            if schedule.placement[edge.source.stage] != schedule.placement[edge.target.stage]:
                self.outgoing[edge.source].append(edge)
                self.incoming[edge.target].append(edge)
        self.sent: defaultdict[tuple[int, int], list[Post]] = defaultdict(list)  # channel -> in order
        self.turn: dict[tuple[Edge, int], int] = {}  # message -> its position in its channel
        for ops in schedule.order:
            for op in ops:
                self._register(op)

    def _register(self, op: Op) -> None:
        for edge in self._edges(op, self.outgoing):
            channel = self.sent[self._channel(edge)]
            self.turn[edge, op.microbatch] = len(channel)
            channel.append(Post(edge, op.microbatch))

    def _edges(self, op: Op, table: dict[Colour, list[Edge]]) -> Iterator[Edge]:
        for phase in PHASES[op.kind]:
            yield from table.get(Colour(op.stage, phase), ())

    def _channel(self, edge: Edge) -> tuple[int, int]:
        placement = self.schedule.placement
        return placement[edge.source.stage], placement[edge.target.stage]

    def programs(self) -> Programs:
        return tuple(tuple(self._program(ops)) for ops in self.schedule.order)

    def _program(self, ops: tuple[Op, ...]) -> Iterator[Instruction]:
        posted: defaultdict[tuple[int, int], int] = defaultdict(int)
        for position, op in enumerate(ops):
            if position == 0:
                yield from self._posts(op, posted)
            if position + 1 < len(ops):
                yield from self._posts(ops[position + 1], posted)
            for edge in self._edges(op, self.incoming):
                yield Wait(edge, op.microbatch)
            yield Compute(op)
            for edge in self._edges(op, self.outgoing):
                yield Send(edge, op.microbatch)

    def _posts(self, op: Op, posted: dict[tuple[int, int], int]) -> Iterator[Post]:
        """The receives that the op needs and that are not posted yet, and those due before them."""
        for edge in self._edges(op, self.incoming):
            channel = self._channel(edge)
            due = self.turn[edge, op.microbatch] + 1
            yield from self.sent[channel][posted[channel] : due]
            posted[channel] = max(posted[channel], due)
