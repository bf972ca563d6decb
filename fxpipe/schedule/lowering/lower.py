"""Lowers a schedule to the instructions of each rank: compute, post receives, wait for them, send.

A *message* has the values of one edge for one microbatch, where the edge's stages lie on different
ranks.  A *channel* is an ordered pair of ranks; its messages travel in the order in which they are
sent, and receives are posted in that same order.

A *collective* replaces the messages of many edges between all ranks.

A *transfer* offloads an activation that F saved, or reloads it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from math import inf
from typing import ClassVar

from fxpipe.errors import ScheduleError
from fxpipe.schedule.check import check
from fxpipe.schedule.costs import Edge
from fxpipe.schedule.lowering.levels import levels
from fxpipe.schedule.ops import PHASES, Color, Direction, Op, Schedule, Transfer, arrival


class CollectiveKind(StrEnum):
    BROADCAST = "broadcast"  # one section's values to a section on every rank
    GATHER = "gather"  # a value of a section on every rank to one section
    ALL_GATHER = "all-gather"  # a value of a section on every rank to a section on every rank


@dataclass(frozen=True, slots=True)
class Collective:
    """``sources`` and ``targets``: one section, or one on every rank in the ranks' order.

    ``number`` identifies the collective; each one has its own communicator.
    """

    kind: CollectiveKind
    number: int
    sources: tuple[Color, ...]
    targets: tuple[Color, ...]

    def __str__(self) -> str:
        source, target = self.sources[0], self.targets[0]
        return f"{self.kind} {source.phase}{source.stage} … -> {target.phase}{target.stage} …"


@dataclass(frozen=True, slots=True)
class StartCollective:
    """Join a collective; does not block."""

    collective: Collective
    microbatch: int

    def __str__(self) -> str:
        return f"join {self.collective}, microbatch {self.microbatch}"


@dataclass(frozen=True, slots=True)
class WaitCollective:
    """Block until a collective has delivered its values."""

    collective: Collective
    microbatch: int

    def __str__(self) -> str:
        return f"collect {self.collective}, microbatch {self.microbatch}"


@dataclass(frozen=True, slots=True)
class Compute:
    op: Op

    def __str__(self) -> str:
        return f"compute {self.op}"


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
class _OnChannel:
    """``messages``: of one channel, in its order."""

    messages: tuple[Message, ...]
    verb: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.verb} {' and '.join(map(str, self.messages))}"


@dataclass(frozen=True, slots=True)
class PostRecv(_OnChannel):
    """Allocate the buffers of messages and start to receive them, as one operation; does not block."""

    verb = "post"


@dataclass(frozen=True, slots=True)
class Wait(_OnChannel):
    """Block until the messages of a post have arrived."""

    verb = "wait"


@dataclass(frozen=True, slots=True)
class Send(_OnChannel):
    """Start to send messages, as one operation; does not block."""

    verb = "send"


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """Start to offload or reload an activation; does not block."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"begin {self.transfer}"


@dataclass(frozen=True, slots=True)
class WaitTransfer:
    """Block until an activation is offloaded and its memory free, or reloaded and ready for use."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"end {self.transfer}"


@dataclass(frozen=True, slots=True)
class AllReduceGradient:
    """Sum the gradient of a parameter that several ranks hold; the first of ``ranks`` receives the others'
    and sends them the sum."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"all-reduce the gradient of {self.name}"


@dataclass(frozen=True, slots=True)
class DivideGradients:
    """Wait until all messages are sent; then divide the gradients by the count of the batch."""

    def __str__(self) -> str:
        return "divide the gradients"


Local = Compute | StartTransfer | WaitTransfer
"""Instructions that involve no other rank."""
AtEnd = AllReduceGradient | DivideGradients
"""Instructions on the gradients of the batch, behind all others."""

Instruction = Local | PostRecv | Wait | Send | StartCollective | WaitCollective | AtEnd
Programs = tuple[tuple[Instruction, ...], ...]
"""The instructions of each rank, in order."""


def lower(schedule: Schedule, edges: tuple[Edge, ...], collectives: tuple[Collective, ...] = ()) -> Programs:
    """The instructions of each rank.

    Before each compute, the receives of the *next* compute are posted and its own receives are waited for;
    after it, its results are sent, and transfers are started or waited for as the schedule says.

    If a channel's messages are needed in another order than they are sent in, messages sent before a needed
    one are posted together with it.  The messages that an op needs of a channel are a single operation, as
    are those that it sends on one: a second operation would wait on its device for the first, and hold up all
    that shares its queue.  Edges within a rank need no instructions, and edges of ``collectives`` no
    messages.  A rank joins a collective as soon as its own contribution is computed.  A rank that only
    receives a broadcast joins one broadcast ahead, and before any op that runs in a later round
    (:mod:`.levels`) than the broadcast's source: so a rank that waits for a broadcast never waits for an op
    that waits for this broadcast.

    Raises ScheduleError if the schedule is not complete, or if two edges join the same two sections.
    """
    check(schedule)
    return _Lowering(schedule, edges, collectives).programs()


def with_gradients(programs: Programs, tied: Sequence[AllReduceGradient], divides: bool) -> Programs:
    """The programs with the instructions on gradients behind all others.

    divides: whether the loss is a (sum, count).
    """
    end = (DivideGradients(),) if divides else ()
    return tuple(
        (*program, *(sums for sums in tied if rank in sums.ranks), *end)
        for rank, program in enumerate(programs)
    )


class _Lowering:
    def __init__(
        self, schedule: Schedule, edges: tuple[Edge, ...], collectives: tuple[Collective, ...]
    ) -> None:
        self.schedule, self.collectives = schedule, collectives
        collected = {
            (a, b) for collective in collectives for a in collective.sources for b in collective.targets
        }
        self.outgoing: defaultdict[Color, list[Edge]] = defaultdict(list)
        self.incoming: defaultdict[Color, list[Edge]] = defaultdict(list)
        joined = set()
        for edge in edges:
            if (edge.source, edge.target) in joined:
                raise ScheduleError(
                    f"two edges from {edge.source.phase}{edge.source.stage} to "
                    f"{edge.target.phase}{edge.target.stage}: merge them into one edge"
                )
            joined.add((edge.source, edge.target))
            if (edge.source, edge.target) in collected:
                continue
            if schedule.placement[edge.source.stage] != schedule.placement[edge.target.stage]:
                self.outgoing[edge.source].append(edge)
                self.incoming[arrival(edge.target)].append(edge)
        self.sent: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)  # channel -> in order
        self.turn: dict[Message, int] = {}  # its position in its channel
        for ops in schedule.order:
            for op in ops:
                self._register(op)
        self.levels = levels(schedule, edges) if collectives else {}

    def _register(self, op: Op) -> None:
        for channel, messages in self._messages(op, self.outgoing).items():
            for message in messages:
                self.turn[message] = len(self.sent[channel])
                self.sent[channel].append(message)

    def _messages(self, op: Op, table: dict[Color, list[Edge]]) -> dict[tuple[int, int], list[Message]]:
        """The messages to or from an op, by channel."""
        found: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
        for phase in PHASES[op.kind]:
            for edge in table.get(Color(op.stage, phase), ()):
                found[self._channel(edge)].append(Message(edge, op.microbatch))
        return found

    def _channel(self, edge: Edge) -> tuple[int, int]:
        placement = self.schedule.placement
        return placement[edge.source.stage], placement[edge.target.stage]

    def programs(self) -> Programs:
        return tuple(tuple(self._program(rank)) for rank in range(self.schedule.ranks))

    def _program(self, rank: int) -> Iterator[Instruction]:
        ops = self.schedule.order[rank]
        posts: dict[Message, PostRecv] = {}
        posted: defaultdict[tuple[int, int], int] = defaultdict(int)  # per channel
        waited: set[PostRecv] = set()
        collectives = _Collectives(self.schedule, self.collectives, self.levels, rank)
        transfers = _Transfers(self.schedule, rank)
        yield from collectives.at_start()
        for position, op in enumerate(ops):
            if position == 0:
                yield from self._posts(op, posts, posted)
            if position + 1 < len(ops):
                yield from self._posts(ops[position + 1], posts, posted)
            yield from transfers.behind(position - 1)
            yield from collectives.in_time(op)
            needed = (m for messages in self._messages(op, self.incoming).values() for m in messages)
            for post in dict.fromkeys(posts[message] for message in needed):
                if post not in waited:
                    waited.add(post)
                    yield Wait(post.messages)
            yield from collectives.before(op)
            yield from transfers.back(position)
            yield Compute(op)
            yield from collectives.after(op)
            for messages in self._messages(op, self.outgoing).values():
                yield Send(tuple(messages))

    def _posts(
        self, op: Op, posts: dict[Message, PostRecv], posted: dict[tuple[int, int], int]
    ) -> Iterator[PostRecv]:
        """The receives that the op needs and that are not posted yet, and those before them."""
        for channel, messages in self._messages(op, self.incoming).items():
            due = 1 + max(self.turn[message] for message in messages)
            for _, together in groupby(self.sent[channel][posted[channel] : due], _arrives_with):
                post = PostRecv(tuple(together))
                posts.update(dict.fromkeys(post.messages, post))
                yield post
            posted[channel] = max(posted[channel], due)


def _arrives_with(message: Message) -> tuple[Color, int]:
    """The section and the microbatch with which a message arrives: one op needs all that arrive with it."""
    return arrival(message.edge.target), message.microbatch


class _Transfers:
    """The transfers of one rank."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.begins: defaultdict[int, list[Transfer]] = defaultdict(list)
        self.ends: defaultdict[int, list[Transfer]] = defaultdict(list)
        for transfer in schedule.transfers:
            if schedule.placement[transfer.stage] == rank:
                self.begins[transfer.begin].append(transfer)
                self.ends[transfer.end].append(transfer)

    def behind(self, position: int) -> Iterator[StartTransfer | WaitTransfer]:
        """The transfer instructions after an op: offloads end before reloads start, to free their memory."""
        begins, ends = self.begins[position + 1], self.ends[position + 1]
        yield from (StartTransfer(t) for t in begins if t.direction is Direction.OUT)
        yield from (WaitTransfer(t) for t in ends if t.direction is Direction.OUT)
        yield from (StartTransfer(t) for t in begins if t.direction is Direction.IN)

    def back(self, position: int) -> Iterator[WaitTransfer]:
        """Waits for the reloads that an op needs."""
        for transfer in self.ends[position]:
            if transfer.direction is Direction.IN:
                yield WaitTransfer(transfer)


class _Collectives:
    """The collective instructions of one rank."""

    def __init__(
        self, schedule: Schedule, collectives: tuple[Collective, ...], levels: Mapping[Op, int], rank: int
    ) -> None:
        self.levels = levels
        self.gives: defaultdict[Color, list[Collective]] = defaultdict(list)
        self.takes: defaultdict[Color, list[Collective]] = defaultdict(list)
        # Broadcasts that it only receives -> the ops that send them.
        self.ahead: dict[Collective, deque[Op]] = {}
        self.joined: Counter[Collective] = Counter()
        self.taken: Counter[Collective] = Counter()
        rank_of_stage = schedule.placement
        for collective in collectives:
            own = [color for color in collective.sources if rank_of_stage[color.stage] == rank]
            for color in own:
                self.gives[color].append(collective)
            if collective.kind is CollectiveKind.BROADCAST and own:
                continue  # the sender already has the values
            for color in collective.targets:
                if rank_of_stage[color.stage] == rank:
                    self.takes[color].append(collective)
            if not own:
                source = collective.sources[0]
                giver = schedule.order[rank_of_stage[source.stage]]
                self.ahead[collective] = deque(
                    op for op in giver if source.stage == op.stage and source.phase in PHASES[op.kind]
                )

    def at_start(self) -> Iterator[StartCollective]:
        for collective in self.ahead:
            yield from self._next(collective)

    def in_time(self, op: Op) -> Iterator[StartCollective]:
        for collective, givers in self.ahead.items():
            while givers and op in self.levels and self.levels.get(givers[0], inf) < self.levels[op]:
                yield from self._next(collective)

    def before(self, op: Op) -> Iterator[WaitCollective]:
        for phase in PHASES[op.kind]:
            for collective in self.takes.get(Color(op.stage, phase), ()):
                yield WaitCollective(collective, op.microbatch)

    def after(self, op: Op) -> Iterator[StartCollective]:
        for phase in PHASES[op.kind]:
            for collective in self.gives.get(Color(op.stage, phase), ()):
                yield StartCollective(collective, op.microbatch)
            for collective in self.takes.get(Color(op.stage, phase), ()):
                if collective in self.ahead:
                    self.taken[collective] += 1
                    if self.joined[collective] <= self.taken[collective]:
                        yield from self._next(collective)

    def _next(self, collective: Collective) -> Iterator[StartCollective]:
        if self.ahead[collective]:
            self.joined[collective] += 1
            yield StartCollective(collective, self.ahead[collective].popleft().microbatch)
