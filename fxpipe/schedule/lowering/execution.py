"""An execution of lowered programs on CPUs, as a graph: each node comes behind others.

A host runs a rank's instructions in order and starts kernels on streams: one for the ops, one for each
channel, each communicator of all ranks, and each direction of transfers. A kernel begins behind the one
before it on its stream, and behind all ops that were started before. A message is carried by a kernel on both
ranks, which can end when both have begun; a collective by one on every rank. A wait blocks the host, which
runs the ops itself.

The programs end if and only if the graph has no cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from fxpipe.schedule.lowering import instructions as ins
from fxpipe.schedule.lowering.channels import Channel, channel_of
from fxpipe.schedule.ops import Activation, Direction

Connections = Sequence[Sequence[Channel | ins.Collective]]
"""Per rank the channels and collectives that it connects before its program, in its order."""


@dataclass(eq=False)
class Execution:
    """A graph of events.  ``before``: per node the nodes that must be over before it.  ``at``: per node the
    rank, and the position of the instruction in its program; -1 for connections.  ``hosts``: the nodes of
    hosts, in their order.  ``streams``: per node at which a kernel is over, or a message delivered, its
    stream or channel, with the position there."""

    before: list[list[int]] = field(default_factory=list)
    at: list[tuple[int, int]] = field(default_factory=list)
    hosts: list[int] = field(default_factory=list)
    streams: dict[int, tuple[Hashable, int]] = field(default_factory=dict)

    def order(self) -> list[int]:
        """The nodes that come to be over, each behind those that it waits for."""
        after: list[list[int]] = [[] for _ in self.before]
        left = [len(before) for before in self.before]
        for node, before in enumerate(self.before):
            for other in before:
                after[other].append(node)
        over = [node for node, number in enumerate(left) if number == 0]
        for node in over:
            for other in after[node]:
                left[other] -= 1
                if left[other] == 0:
                    over.append(other)
        return over


@dataclass(eq=False)
class _Meetings:
    """The nodes at which several ranks meet, by key and turn; the turns of a key come one after the other."""

    nodes: dict[tuple[Hashable, int], int] = field(default_factory=dict)
    turns: Counter[Hashable] = field(default_factory=Counter)

    def next(self, key: Hashable) -> int:
        """Count the times that a key was asked for before."""
        self.turns[key] += 1
        return self.turns[key] - 1


class Rank:
    """Adds the nodes of one rank.  ``ops``: the nodes that the next kernel comes behind."""

    def __init__(
        self,
        number: int,
        placement: Sequence[int],
        graph: Execution,
        meetings: _Meetings,
        program: Sequence[ins.Instruction],
    ) -> None:
        self.number, self.placement = number, placement
        self.graph, self.meetings, self.program = graph, meetings, program
        self.position = -1
        self.host = self.host_node([])
        self.ops: list[int] = []
        self.tails: dict[Hashable, int] = {}
        self.sent: list[int] = []
        self.sums: list[int] = []
        self.gathers: dict[int, int] = {}
        self.received: dict[Hashable, int] = {}
        self.moved: dict[Activation, int] = {}
        self.connected: set[Channel | ins.Collective] | None = None  # None: all

    def connect(self, connections: Sequence[Channel | ins.Collective]) -> None:
        self.connected = set()
        for what in connections:
            self._use(what)

    def run(self, position: int, instruction: ins.Instruction) -> None:
        self.position = position
        self.host = self.host_node([self.host])
        match instruction:
            case ins.Compute():
                self.op()
            case ins.PostRecv(messages):
                channel = channel_of(messages[0], self.placement)
                self.received[messages] = self.message(channel, False, len(messages))
            case ins.Send(messages):
                self.message(channel_of(messages[0], self.placement), True, len(messages))
            case ins.Wait(messages):
                self._wait_for(messages)
            case ins.StartCollective(collective, m):
                self._use(collective)
                group = "collectives", collective.group
                turn = self.meetings.next((group, self.number))
                over = self.kernel(group, meets=[(group, turn)])
                self.received[collective, m] = over
                self.sent.append(over)
            case ins.WaitCollective(collective, m):
                self._wait_for((collective, m))
            case ins.StartTransfer(transfer):
                waits = [self.moved[transfer.activation]] if transfer.direction is Direction.IN else []
                self.moved[transfer.activation] = self.kernel(("transfer", transfer.direction), waits=waits)
            case ins.WaitTransfer(transfer):
                self.wait(self.moved[transfer.activation])
            # The other replicas run the same program: they come to what they do together as this one does.
            case ins.ReduceGradients():
                self.sums.append(self.kernel("replicas"))
            case ins.GatherParameters(bucket):
                self.gathers[bucket] = self.kernel("replicas")
            case ins.WaitParameters(bucket):
                self.wait(self.gathers[bucket])
            case ins.FreeParameters() | ins.SumOverLanes():
                pass  # in the order of the stream of the ops
            case ins.WaitGradients():
                for over in self.sums:
                    self.wait(over)
            case ins.AllReduceGradient(_, ranks):
                self._all_reduce(ranks)
            case ins.DivideGradients():
                self.end()

    def end(self) -> None:
        """Start an op that writes the gradients: it divides them, or the optimizer clears them."""
        for over in self.sent:
            self.wait(over)
        self.op()

    def node(self, before: Iterable[int]) -> int:
        self.graph.before.append(list(before))
        self.graph.at.append((self.number, self.position))
        return len(self.graph.before) - 1

    def host_node(self, before: Iterable[int]) -> int:
        node = self.node(before)
        self.graph.hosts.append(node)
        return node

    def _meet(self, key: Hashable, turn: int, begun: int) -> int:
        """The node at which all ranks have begun that meet at this key for this turn."""
        nodes = self.meetings.nodes
        if (key, turn) not in nodes:
            nodes[key, turn] = node = self.node([nodes[key, turn - 1]] if (key, turn - 1) in nodes else [])
            self.graph.streams[node] = key, turn
        self.graph.before[nodes[key, turn]].append(begun)
        return nodes[key, turn]

    def _use(self, what: Channel | ins.Collective) -> None:
        """Connect a channel or a collective where it is used first."""
        if self.connected is not None and what not in self.connected:
            self.connected.add(what)
            # A device may have to be idle when memory for a communicator is allocated.
            begun = self.node([self.host, *self.tails.values()])
            self.host = self.host_node([self._meet(("connect", what), 0, begun)])

    def kernel(
        self, stream: Hashable, *, meets: Sequence[tuple[Hashable, int]] = (), waits: Iterable[int] = ()
    ) -> int:
        """Start a kernel; return the node at which it is over.  That node comes behind the one at which the
        kernel has begun, and behind those at which it meets others."""
        key = self.number, stream
        before = [self.host, *self.ops, *waits]
        if key in self.tails:
            before.append(self.tails[key])
        begun = self.node(before)
        met = [self._meet(*meeting, begun) for meeting in meets]
        over = self.node([begun, *met])
        self.graph.streams[over] = key, self.meetings.next(key)
        self.tails[key] = over
        return over

    def op(self) -> None:
        """Run an op."""
        over = self.kernel("ops")
        self.ops = [over]
        self.host = self.host_node([over])

    def wait(self, over: int) -> None:
        self.host = self.host_node([self.host, over])

    def _wait_for(self, key: Hashable) -> None:
        """Wait for messages or a collective; for ever, if they were not posted or joined."""
        if key not in self.received:
            never = self.node([])
            self.graph.before[never].append(never)
            self.received[key] = never
        self.wait(self.received[key])

    def message(self, channel: Channel, sends: bool, number: int = 1) -> int:
        """Send or receive so many messages with one kernel."""
        self._use(channel)
        turns = [(("message", channel), self.meetings.next((channel, sends))) for _ in range(number)]
        over = self.kernel(channel, meets=turns)
        if sends:
            self.sent.append(over)
        return over

    def _all_reduce(self, ranks: tuple[int, ...]) -> None:
        first, here = ranks[0], self.number
        if here != first:
            self.message((here, first), True)
        for other in ranks[1:] if here == first else ranks[:1]:
            self.wait(self.message((other, here), False))
            self.op()
        for other in ranks[1:] if here == first else ():
            self.message((here, other), True)


def execution(
    programs: ins.Programs,
    placement: Sequence[int],
    connections: Connections | None = None,
    rank: Callable[..., Rank] = Rank,
) -> Execution:
    """The graph of the programs of all ranks, whose messages and collectives match.

    connections: a channel or collective that is not among them is connected where it is first used, which
        blocks the hosts until all of its ranks are there.  By default all are connected.
    rank: makes a :class:`Rank`, or a subclass for a runtime that fxpipe does not have.
    """
    graph, meetings = Execution(), _Meetings()
    for number, program in enumerate(programs):
        member = rank(number, placement, graph, meetings, program)
        if connections is not None:
            member.connect(connections[number])
        for position, instruction in enumerate(program):
            member.run(position, instruction)
        member.end()
    return graph
