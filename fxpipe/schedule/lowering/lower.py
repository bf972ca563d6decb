"""A schedule to what each rank really does: compute, post receives, wait for them, send.

A *message* is what one edge carries for one microbatch, where the edge's stages lie on different
ranks.  A *channel* is an ordered pair of ranks; its messages travel in the order in which they are
sent, and receives are posted in that same order.

An *exchange* takes the place of the messages of many edges between all ranks at once, a collective.

A *transfer* moves what F saved off the rank, or back.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from fxpipe.errors import ScheduleError
from fxpipe.ir.graph import Colour, arrival
from fxpipe.schedule.check import check
from fxpipe.schedule.costs import Edge
from fxpipe.schedule.lowering.levels import levels
from fxpipe.schedule.ops import PHASES, Direction, Op, Schedule, Transfer


class ExchangeKind(StrEnum):
    BROADCAST = "broadcast"  # one section's values to a section on every rank
    GATHER = "gather"  # a value of a section on every rank to one section
    ALL_GATHER = "all-gather"  # a value of a section on every rank to a section on every rank


@dataclass(frozen=True, slots=True)
class Exchange:
    """``sources`` and ``targets``: one section, or one on every rank in the ranks' order.

    ``number`` tells exchanges apart; each has a communicator of its own.
    """

    kind: ExchangeKind
    number: int
    sources: tuple[Colour, ...]
    targets: tuple[Colour, ...]

    def __str__(self) -> str:
        source, target = self.sources[0], self.targets[0]
        return f"{self.kind} {source.phase}{source.stage} … -> {target.phase}{target.stage} …"


@dataclass(frozen=True, slots=True)
class Join:
    """Take part in an exchange; does not block."""

    exchange: Exchange
    microbatch: int

    def __str__(self) -> str:
        return f"join {self.exchange}, microbatch {self.microbatch}"


@dataclass(frozen=True, slots=True)
class Collect:
    """Go on when an exchange has brought its values."""

    exchange: Exchange
    microbatch: int

    def __str__(self) -> str:
        return f"collect {self.exchange}, microbatch {self.microbatch}"


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


@dataclass(frozen=True, slots=True)
class Begin:
    """Start to move an activation; does not block."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"begin {self.transfer}"


@dataclass(frozen=True, slots=True)
class End:
    """Go on when an activation has been moved: it takes no memory any more, or can be used again."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"end {self.transfer}"


Local = Compute | Begin | End
"""What a rank does by itself."""

Instruction = Local | Post | Wait | Send | Join | Collect
Programs = tuple[tuple[Instruction, ...], ...]
"""What each rank does, in order."""


def lower(schedule: Schedule, edges: tuple[Edge, ...], exchanges: tuple[Exchange, ...] = ()) -> Programs:
    """Before each compute the receives of the *next* one are posted, and those of its own waited for;
    after it its results are sent, and transfers begun or waited for as the schedule says.

    Where a channel's messages are needed in another order than they are sent in, the ones sent before
    a needed one are posted together with it.  Edges within a rank give no instruction, nor do those of
    ``exchanges``, which ranks join as soon as they have what they give.  Who only takes from a broadcast
    joins one ahead, and before any op that runs in a later round (:mod:`.levels`) than the broadcast's
    source: so who waits for a broadcast never waits for an op that waits for it.

    Raises ScheduleError where the schedule is not whole or two edges join the same two sections.
    """
    check(schedule)
    return _Lowering(schedule, edges, exchanges).programs()


class _Lowering:
    def __init__(self, schedule: Schedule, edges: tuple[Edge, ...], exchanges: tuple[Exchange, ...]) -> None:
        self.schedule, self.exchanges = schedule, exchanges
        exchanged = {(a, b) for exchange in exchanges for a in exchange.sources for b in exchange.targets}
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
            if (edge.source, edge.target) in exchanged:
                continue
            if schedule.placement[edge.source.stage] != schedule.placement[edge.target.stage]:
                self.outgoing[edge.source].append(edge)
                self.incoming[arrival(edge.target)].append(edge)
        self.sent: defaultdict[tuple[int, int], list[Post]] = defaultdict(list)  # channel -> in order
        self.turn: dict[tuple[Edge, int], int] = {}  # message -> its position in its channel
        for ops in schedule.order:
            for op in ops:
                self._register(op)
        self.levels = levels(schedule, edges) if exchanges else {}

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
        return tuple(tuple(self._program(rank)) for rank in range(self.schedule.ranks))

    def _program(self, rank: int) -> Iterator[Instruction]:
        ops = self.schedule.order[rank]
        posted: defaultdict[tuple[int, int], int] = defaultdict(int)
        part = _Part(self.schedule, self.exchanges, self.levels, rank)
        moves = _Moves(self.schedule, rank)
        yield from part.at_start()
        for position, op in enumerate(ops):
            if position == 0:
                yield from self._posts(op, posted)
            if position + 1 < len(ops):
                yield from self._posts(ops[position + 1], posted)
            yield from moves.behind(position - 1)
            yield from part.in_time(op)
            for edge in self._edges(op, self.incoming):
                yield Wait(edge, op.microbatch)
            yield from part.before(op)
            yield from moves.back(position)
            yield Compute(op)
            yield from part.after(op)
            for edge in self._edges(op, self.outgoing):
                yield Send(edge, op.microbatch)

    def _posts(self, op: Op, posted: dict[tuple[int, int], int]) -> Iterator[Post]:
        """The receives that the op needs and that are not posted yet, and those due before them."""
        for edge in self._edges(op, self.incoming):
            channel = self._channel(edge)
            due = self.turn[edge, op.microbatch] + 1
            yield from self.sent[channel][posted[channel] : due]
            posted[channel] = max(posted[channel], due)


class _Moves:
    """One rank's transfers."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.begins: defaultdict[int, list[Transfer]] = defaultdict(list)
        self.ends: defaultdict[int, list[Transfer]] = defaultdict(list)
        for transfer in schedule.transfers:
            if schedule.placement[transfer.stage] == rank:
                self.begins[transfer.begin].append(transfer)
                self.ends[transfer.end].append(transfer)

    def behind(self, position: int) -> Iterator[Begin | End]:
        """What is done behind an op: memory is freed before it is taken again."""
        begins, ends = self.begins[position + 1], self.ends[position + 1]
        yield from (Begin(t) for t in begins if t.direction is Direction.OUT)
        yield from (End(t) for t in ends if t.direction is Direction.OUT)
        yield from (Begin(t) for t in begins if t.direction is Direction.IN)

    def back(self, position: int) -> Iterator[End]:
        """What an op cannot do without."""
        for transfer in self.ends[position]:
            if transfer.direction is Direction.IN:
                yield End(transfer)


class _Part:
    """One rank's part in the exchanges."""

    def __init__(
        self, schedule: Schedule, exchanges: tuple[Exchange, ...], levels: Mapping[Op, int], rank: int
    ) -> None:
        self.levels = levels
        self.gives: defaultdict[Colour, list[Exchange]] = defaultdict(list)
        self.takes: defaultdict[Colour, list[Exchange]] = defaultdict(list)
        self.ahead: dict[Exchange, deque[Op]] = {}  # of broadcasts that it only takes from, what gives them
        self.joined: Counter[Exchange] = Counter()
        self.taken: Counter[Exchange] = Counter()
        home = schedule.placement
        for exchange in exchanges:
            own = [colour for colour in exchange.sources if home[colour.stage] == rank]
            for colour in own:
                self.gives[colour].append(exchange)
            if exchange.kind is ExchangeKind.BROADCAST and own:
                continue  # what it takes it has
            for colour in exchange.targets:
                if home[colour.stage] == rank:
                    self.takes[colour].append(exchange)
            if not own:
                source = exchange.sources[0]
                giver = schedule.order[home[source.stage]]
                self.ahead[exchange] = deque(
                    op for op in giver if source.stage == op.stage and source.phase in PHASES[op.kind]
                )

    def at_start(self) -> Iterator[Join]:
        for exchange in self.ahead:
            yield from self._next(exchange)

    def in_time(self, op: Op) -> Iterator[Join]:
        for exchange, givers in self.ahead.items():
            while givers and op in self.levels and self.levels.get(givers[0], inf) < self.levels[op]:
                yield from self._next(exchange)

    def before(self, op: Op) -> Iterator[Collect]:
        for phase in PHASES[op.kind]:
            for exchange in self.takes.get(Colour(op.stage, phase), ()):
                yield Collect(exchange, op.microbatch)

    def after(self, op: Op) -> Iterator[Join]:
        for phase in PHASES[op.kind]:
            for exchange in self.gives.get(Colour(op.stage, phase), ()):
                yield Join(exchange, op.microbatch)
            for exchange in self.takes.get(Colour(op.stage, phase), ()):
                if exchange in self.ahead:
                    self.taken[exchange] += 1
                    if self.joined[exchange] <= self.taken[exchange]:
                        yield from self._next(exchange)

    def _next(self, exchange: Exchange) -> Iterator[Join]:
        if self.ahead[exchange]:
            self.joined[exchange] += 1
            yield Join(exchange, self.ahead[exchange].popleft().microbatch)
