"""Lowers a schedule to the instructions of each rank."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from math import inf
from typing import NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.schedule.bucket_use import Asks, BucketUse
from fxpipe.schedule.check import check
from fxpipe.schedule.costs import Edge
from fxpipe.schedule.lowering import instructions as ins
from fxpipe.schedule.lowering.channels import Channel, channel_of
from fxpipe.schedule.ops import PHASES, Color, Direction, Op, Schedule, Transfer, arrival
from fxpipe.schedule.simulation.run_loop import RunLoop
from fxpipe.schedule.simulation.timeline import Span


def lower(
    schedule: Schedule,
    edges: tuple[Edge, ...],
    collectives: tuple[ins.Collective, ...] = (),
    spans: Sequence[Sequence[Span]] = (),
) -> ins.Programs:
    """The instructions of each rank.

    Before each compute, the receives of the *next* compute are posted and its own receives are waited for;
    after it, its results are sent, and transfers are started or waited for as the schedule says.

    If a channel's messages are needed in another order than they are sent in, messages sent before a needed
    one are posted together with it.  What an op needs of a channel, and what it sends on one, is a single
    operation: a second one would wait on its device for the first, and hold up whatever shares its queue.
    Edges within a rank need no instructions, and edges of ``collectives`` no messages.

    All ranks join the collectives of a communicator in one order: that in which their last contributions are
    computed by the simulated ``spans`` of the ranks, and by rounds (``levels``) at equal times.  So in
    simulated time none waits for another.  A rank joins a collective as soon as it has computed its own
    contribution and its turn has come.  It joins one broadcast ahead of those that it has taken, and before
    any op that starts when the broadcast's source is over.  So what comes before a collective, in the order
    or on a rank, never waits for it.

    Raises ScheduleError if the schedule is not complete, or if two edges join the same two sections.
    """
    check(schedule)
    return _Lowering(schedule, edges, collectives, spans).programs()


def with_gradients(
    programs: ins.Programs,
    buckets: Sequence[Sequence[BucketUse]],
    tied: Sequence[ins.AllReduceGradient],
    divides: bool,
) -> ins.Programs:
    """The programs with the instructions on gradients, and on what replicas have of each other.

    buckets: of each rank.  What an op needs of other replicas is asked for as ``Asks`` says, and what is
        needed at first at the start.  Gradients are summed behind their op, as soon as what others
        wait for is sent.
    divides: whether the loss is a (sum, count).
    """
    end = (ins.DivideGradients(),) if divides else ()
    return tuple(
        (*_with_buckets(program, uses), *(sums for sums in tied if rank in sums.ranks), *end)
        for rank, (program, uses) in enumerate(zip(programs, buckets, strict=True))
    )


def _with_buckets(
    program: Sequence[ins.Instruction], buckets: Sequence[BucketUse]
) -> Iterator[ins.Instruction]:
    ops = [i.op for i in program if isinstance(i, ins.Compute)]
    gathered_for, asks, freed, summed = (defaultdict[Op, list[int]](list) for _ in range(4))
    for k, use in enumerate(buckets):
        for first, last in use.spans:
            gathered_for[first].append(k)
            if use.frees:
                freed[last].append(k)
        for op in use.sums:
            summed[op].append(k)
    # With spans until the end of the step nothing is gained by a later start.
    if not any(use.frees for use in buckets):
        yield from (ins.GatherParameters(k) for op in ops for k in gathered_for.get(op, ()))
    elif ops:
        yield from map(ins.GatherParameters, gathered_for.get(ops[0], ()))
        order = Asks(ops)
        for k, use in enumerate(buckets):
            for op, _ in order.of(use):
                asks[op].append(k)
    free, sums = list[ins.Instruction](), list[ins.Instruction]()
    for instruction in program:
        if not isinstance(instruction, ins.Send | ins.StartCollective):
            yield from free
            free = []
        if isinstance(instruction, ins.Compute):
            # Before the sums, which share their link and which no op waits for.
            yield from map(ins.GatherParameters, asks.get(instruction.op, ()))
            yield from map(ins.WaitParameters, gathered_for.get(instruction.op, ()))
        if not isinstance(instruction, ins.Send | ins.StartCollective):
            yield from sums
            sums = []
        yield instruction
        if isinstance(instruction, ins.Compute):
            free = [*map(ins.FreeParameters, freed[instruction.op])]
            sums = []
            for k in summed[instruction.op]:
                of_lanes = buckets[k].of_lanes
                sums += (
                    [ins.ReduceGradients(k)]
                    if of_lanes is None
                    else [ins.SumOverLanes(k, of_lanes), ins.ReduceGradients(k)]
                )
    yield from (*free, *sums)
    if any(use.sums for use in buckets):
        yield ins.WaitGradients()


class _Lowering:
    def __init__(
        self,
        schedule: Schedule,
        edges: tuple[Edge, ...],
        collectives: tuple[ins.Collective, ...],
        spans: Sequence[Sequence[Span]],
    ) -> None:
        self.schedule = schedule
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
        self.channels: defaultdict[Channel, list[ins.Message]] = defaultdict(list)  # channel -> in order
        self.turn: dict[ins.Message, int] = {}  # its position in its channel
        for ops in schedule.order:
            for op in ops:
                for channel, messages in self._messages(op, self.outgoing).items():
                    for message in messages:
                        self.turn[message] = len(self.channels[channel])
                        self.channels[channel].append(message)
        rounds = levels(schedule, edges) if collectives else {}
        times = {op: Span(op, 0.0, 0.0) for ops in schedule.order for op in ops}
        times |= {span.op: span for rank_spans in spans for span in rank_spans}
        self.starts = {op: (times[op].start, float(level)) for op, level in rounds.items()}
        self.turns = sorted(_turns(schedule, collectives, rounds, times))

    def _messages(self, op: Op, table: dict[Color, list[Edge]]) -> dict[Channel, list[ins.Message]]:
        """The messages to or from an op, by channel."""
        messages: defaultdict[Channel, list[ins.Message]] = defaultdict(list)
        for phase in PHASES[op.kind]:
            for edge in table.get(Color(op.stage, phase), ()):
                message = ins.Message(edge, op.microbatch)
                messages[channel_of(message, self.schedule.placement)].append(message)
        return messages

    def programs(self) -> ins.Programs:
        return tuple(tuple(self._program(rank)) for rank in range(self.schedule.ranks))

    def _program(self, rank: int) -> Iterator[ins.Instruction]:
        ops = self.schedule.order[rank]
        posts: dict[ins.Message, ins.PostRecv] = {}
        posted: defaultdict[Channel, int] = defaultdict(int)  # per channel
        waited: set[ins.PostRecv] = set()
        collectives = _Collectives(self.schedule.placement, self.turns, self.starts, rank)
        transfers = _Transfers(self.schedule, rank)
        yield from collectives.at_start()
        for position, op in enumerate(ops):
            if position == 0:
                yield from self._posts(op, posts, posted)
            if position + 1 < len(ops):
                yield from self._posts(ops[position + 1], posts, posted)
            yield from transfers.behind(position - 1)
            yield from collectives.in_time(op)
            arriving = (m for messages in self._messages(op, self.incoming).values() for m in messages)
            for post in dict.fromkeys(posts[message] for message in arriving):
                if post not in waited:
                    waited.add(post)
                    yield ins.Wait(post.messages)
            yield from collectives.before(op)
            yield from transfers.back(position)
            yield ins.Compute(op)
            yield from collectives.after(op)
            for messages in self._messages(op, self.outgoing).values():
                yield ins.Send(tuple(messages))

    def _posts(
        self, op: Op, posts: dict[ins.Message, ins.PostRecv], posted: dict[Channel, int]
    ) -> Iterator[ins.PostRecv]:
        """The receives that the op needs and that are not posted yet, and those before them."""
        for channel, messages in self._messages(op, self.incoming).items():
            due = 1 + max(self.turn[message] for message in messages)
            for _, together in groupby(self.channels[channel][posted[channel] : due], _arrives_with):
                post = ins.PostRecv(tuple(together))
                posts.update(dict.fromkeys(post.messages, post))
                yield post
            posted[channel] = max(posted[channel], due)


def levels(schedule: Schedule, edges: Sequence[Edge]) -> dict[Op, int]:
    """The round in which each op runs if every op takes one round and starts as early as possible.

    An op's level is above the levels of the ops before it on its rank and of the ops whose results it needs.
    Ops that are deadlocked have no level.
    """
    sources: defaultdict[Color, list[Color]] = defaultdict(list)
    for edge in edges:
        sources[arrival(edge.target)].append(edge.source)
    value_level: dict[tuple[Color, int], int] = {}
    op_level: dict[Op, int] = {}
    at, level = [0] * schedule.ranks, [0] * schedule.ranks
    loop = RunLoop[tuple[Color, int]](schedule.ranks)

    def advance(rank: int) -> tuple[Color, int] | None:
        while at[rank] < len(schedule.order[rank]):
            op = schedule.order[rank][at[rank]]
            colors = [Color(op.stage, phase) for phase in PHASES[op.kind]]
            inputs = [(c, op.microbatch) for color in colors for c in sources[color] if c not in colors]
            for value in inputs:
                if value not in value_level:
                    return value
            op_level[op] = level[rank] = 1 + max([level[rank], *(value_level[value] for value in inputs)])
            at[rank] += 1
            for color in colors:
                value_level[color, op.microbatch] = level[rank]
                loop.happened((color, op.microbatch))
        return None

    loop.run(advance)
    return op_level


def _arrives_with(message: ins.Message) -> tuple[Color, int]:
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

    def behind(self, position: int) -> Iterator[ins.StartTransfer | ins.WaitTransfer]:
        """The transfer instructions after an op: offloads end before reloads start, to free their memory."""
        begins, ends = self.begins[position + 1], self.ends[position + 1]
        yield from (ins.StartTransfer(t) for t in begins if t.direction is Direction.OUT)
        yield from (ins.WaitTransfer(t) for t in ends if t.direction is Direction.OUT)
        yield from (ins.StartTransfer(t) for t in begins if t.direction is Direction.IN)

    def back(self, position: int) -> Iterator[ins.WaitTransfer]:
        """Waits for the reloads that an op needs."""
        for transfer in self.ends[position]:
            if transfer.direction is Direction.IN:
                yield ins.WaitTransfer(transfer)


_Moment = tuple[float, float]
"""Simulated seconds, and the round at equal times."""


class _Turn(NamedTuple):
    """A collective for a microbatch, its ``turn``-th; its last contribution is computed at ``moment``."""

    moment: _Moment
    microbatch: int
    number: int
    turn: int
    collective: ins.Collective


def _turns(
    schedule: Schedule,
    collectives: tuple[ins.Collective, ...],
    rounds: Mapping[Op, int],
    times: Mapping[Op, Span],
) -> Iterator[_Turn]:
    ends_of = {
        (Color(op.stage, phase), op.microbatch): (span.end, rounds.get(op, inf))
        for op, span in times.items()
        for phase in PHASES[op.kind]
    }
    for collective in collectives:
        moments = []
        for m in range(schedule.microbatches):
            ends, last = zip(*(ends_of[color, m] for color in collective.sources), strict=True)
            moments.append(((max(ends), max(last) + 0.5), m))  # before the ops of the next round
        for turn, (moment, m) in enumerate(sorted(moments)):
            yield _Turn(moment, m, collective.number, turn, collective)


class _Collectives:
    """The collective instructions of one rank."""

    def __init__(
        self,
        placement: tuple[int, ...],
        turns: Sequence[_Turn],
        starts: Mapping[Op, _Moment],
        rank: int,
    ) -> None:
        self.starts = starts
        self.turns: defaultdict[int, deque[_Turn]] = defaultdict(deque)  # of each communicator
        self.source_in: dict[ins.Collective, Color | None] = {}  # the section that contributes
        self.taken_by: defaultdict[Color, list[ins.Collective]] = defaultdict(list)
        self.computed: set[tuple[Color | None, int]] = set()
        self.received: Counter[ins.Collective] = Counter()
        for turn in turns:
            self.turns[turn.collective.group].append(turn)
            self.source_in.setdefault(turn.collective, None)
        for collective in self.source_in:
            for color in collective.sources:
                if placement[color.stage] == rank:
                    self.source_in[collective] = color
            if collective.kind is ins.CollectiveKind.BROADCAST and self.source_in[collective]:
                continue  # the sender already has the values
            for color in collective.targets:
                if placement[color.stage] == rank:
                    self.taken_by[color].append(collective)

    def at_start(self) -> Iterator[ins.StartCollective]:
        yield from self._joined(self._is_due)

    def in_time(self, op: Op) -> Iterator[ins.StartCollective]:
        yield from self._joined(lambda turn: op in self.starts and turn.moment < self.starts[op])

    def before(self, op: Op) -> Iterator[ins.WaitCollective]:
        for phase in PHASES[op.kind]:
            for collective in self.taken_by.get(Color(op.stage, phase), ()):
                yield ins.WaitCollective(collective, op.microbatch)

    def after(self, op: Op) -> Iterator[ins.StartCollective]:
        for phase in PHASES[op.kind]:
            self.computed.add((Color(op.stage, phase), op.microbatch))
            self.received.update(self.taken_by.get(Color(op.stage, phase), ()))
        yield from self._joined(self._is_due)

    def _joined(self, is_wanted: Callable[[_Turn], bool]) -> Iterator[ins.StartCollective]:
        """Join what is wanted and what comes before it, as far as the rank has its contributions."""
        for turns in self.turns.values():
            able = list(takewhile(self._is_able, turns))
            while able and not is_wanted(able[-1]):
                able.pop()
            for turn in able:
                turns.popleft()
                yield ins.StartCollective(turn.collective, turn.microbatch)

    def _is_able(self, turn: _Turn) -> bool:
        source = self.source_in[turn.collective]
        return source is None or (source, turn.microbatch) in self.computed

    def _is_due(self, turn: _Turn) -> bool:
        """Whether it is to be joined as soon as the rank can: one broadcast ahead of those it has taken."""
        return self.source_in[turn.collective] is not None or turn.turn <= self.received[turn.collective]
