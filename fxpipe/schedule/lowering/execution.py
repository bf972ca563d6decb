"""An execution of lowered programs on hosts and devices, as a graph: what must be over before what begins.

A host runs a rank's instructions in order and starts kernels on streams of its device: one stream for the
ops, one for each channel, each communicator of all ranks, and each direction of transfers.  A kernel begins
behind the one before it on its stream, and behind all ops that were started before it.  A message is carried
by a kernel on both ranks, which can end when both have begun; a collective by one on every rank.

The programs end if and only if the graph has no cycle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from fxpipe.schedule.lowering.channels import Channel, channel_of
from fxpipe.schedule.lowering.lower import (
    AllReduceGradient,
    Collective,
    Compute,
    DivideGradients,
    Instruction,
    Message,
    PostRecv,
    Programs,
    Send,
    StartCollective,
    StartTransfer,
    Wait,
    WaitCollective,
    WaitTransfer,
)
from fxpipe.schedule.ops import Activation, Direction, OpKind

Connections = Sequence[Sequence[Channel | Collective]]
"""Per rank what it connects before its program, in its order."""


@dataclass(frozen=True)
class Machine:
    """How ranks wait.

    ``hosts_wait``: a wait blocks the host, which runs the ops itself, as on a CPU; else it holds up the
    stream of the ops.  ``one_queue``: the streams of a rank share one queue of the device, in the order in
    which its host started kernels; the first that may not begin holds up those behind it.  ``run_ahead``: the
    host waits until at most that many ops are started and not over.

    For backends and runtimes that fxpipe does not have.  ``kernels``: of each message; 0: one for all that an
    instruction sends or receives.  ``sends_wait``: ops wait for the sends before them.  ``divides_at_once``:
    gradients are divided while they are sent.  ``loads``: the kernels of a section are loaded when it first
    runs, for which the driver waits until all that was started on the device is over.
    """

    name: str
    hosts_wait: bool = False
    one_queue: bool = False
    run_ahead: int | None = None
    kernels: int = 0
    sends_wait: bool = False
    divides_at_once: bool = False
    loads: bool = False


HOSTS = Machine("CPUs", hosts_wait=True)
#: Each stream has a queue of its own, which the runtime makes sure of.
DEVICES = Machine("devices", run_ahead=4)


OPTIMIZER = "the optimizer"
#: An instruction, or one part of the sum of a gradient and the other rank of it.
Work = Instruction | tuple[str, AllReduceGradient, int] | str


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of ``rank``, which begins at a node of the graph.  ``over``: the node at which it is over, or
    those at which the messages that it ``carries`` are delivered."""

    rank: int
    what: Work
    begun: int
    over: tuple[int, ...]
    carries: tuple[Message, ...] = ()


@dataclass(eq=False)
class Execution:
    """``before``: per node the nodes that must be over before it.  ``at``: per node the rank, and the
    position of the instruction in its program; -1 for connections.  ``hosts``: the nodes of hosts, in their
    order.  ``streams``: per node at which a kernel is over, or a message delivered, its stream or channel,
    with the position there.
    """

    before: list[list[int]] = field(default_factory=list)
    at: list[tuple[int, int]] = field(default_factory=list)
    hosts: list[int] = field(default_factory=list)
    streams: dict[int, tuple[Hashable, int]] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)

    def order(self) -> list[int]:
        """The nodes that come to be over, each behind those that it waits for."""
        after: list[list[int]] = [[] for _ in self.before]
        left = [len(before) for before in self.before]
        for node, before in enumerate(self.before):
            for other in before:
                after[other].append(node)
        found = [node for node, number in enumerate(left) if number == 0]
        for node in found:
            for other in after[node]:
                left[other] -= 1
                if left[other] == 0:
                    found.append(other)
        return found


def execution(
    programs: Programs,
    placement: Sequence[int],
    machine: Machine,
    connections: Connections | None = None,
) -> Execution:
    """The graph of the programs of all ranks, whose messages and collectives match.

    connections: what is not among them is connected where it is first used, which blocks the hosts until all
    of its ranks are there.  By default everything is connected.
    """
    graph, meetings = Execution(), _Meetings()
    for number, program in enumerate(programs):
        rank = _Rank(number, placement, machine, graph, meetings)
        if connections is not None:
            rank.connect(connections[number])
        for position, instruction in enumerate(program):
            rank.run(position, instruction)
        rank.end()
    return graph


@dataclass(eq=False)
class _Meetings:
    """What several ranks come to: the node at which all are there, by key and turn; the turns of a key come
    one after the other."""

    nodes: dict[tuple[Hashable, int], int] = field(default_factory=dict)
    turns: defaultdict[Hashable, int] = field(default_factory=lambda: defaultdict(int))

    def next(self, key: Hashable) -> int:
        """How often the key was asked for before."""
        self.turns[key] += 1
        return self.turns[key] - 1


class _Rank:
    """Adds the nodes of one rank.  ``ops``: the nodes that the next kernel comes behind."""

    def __init__(
        self,
        number: int,
        placement: Sequence[int],
        machine: Machine,
        graph: Execution,
        meetings: _Meetings,
    ) -> None:
        self.number, self.placement, self.machine = number, placement, machine
        self.graph, self.meetings = graph, meetings
        self.position = -1
        self.host = self._host([])
        self.ops: list[int] = []
        self.tails: dict[Hashable, int] = {}
        self.queue: list[int] = []
        self.ended: list[int] = []
        self.sent: list[int] = []
        self.received: dict[Hashable, int] = {}
        self.moved: dict[Activation, int] = {}
        self.connected: set[Channel | Collective] | None = None  # None: all
        self.loaded: set[tuple[int, OpKind]] = set()

    def connect(self, connections: Sequence[Channel | Collective]) -> None:
        self.connected = set()
        for what in connections:
            self._use(what)

    def run(self, position: int, instruction: Instruction) -> None:
        self.position = position
        self.host = self._host([self.host])
        match instruction:
            case Compute(op):
                if self.machine.loads and (op.stage, op.kind) not in self.loaded:
                    self.loaded.add((op.stage, op.kind))
                    self.host = self._host([self.host, *self.tails.values()])
                self._op(instruction)
            case PostRecv(messages):
                channel = channel_of(messages[0], self.placement)
                self.received[messages] = self._message(channel, False, instruction, messages)
            case Send(messages):
                self._message(channel_of(messages[0], self.placement), True, instruction, messages)
            case Wait(messages):
                self._wait_for(messages)
            case StartCollective(collective, m):
                self._use(collective)
                group = "collectives", collective.group
                turn = self.meetings.next((group, self.number))
                over = self._kernel(group, instruction, meets=[(group, turn)])
                self.received[collective, m] = over
                self.sent.append(over)
            case WaitCollective(collective, m):
                self._wait_for((collective, m))
            case StartTransfer(transfer):
                waits = [] if transfer.direction is Direction.OUT else [self.moved[transfer.activation]]
                stream = "transfer", transfer.direction
                self.moved[transfer.activation] = self._kernel(stream, instruction, waits=waits)
            case WaitTransfer(transfer):
                self._wait(self.moved[transfer.activation])
                if transfer.direction is Direction.OUT:  # its memory is free for what comes next
                    self._touch(instruction)
            case AllReduceGradient():
                self._all_reduce(instruction)
            case DivideGradients():
                self._end(waits=not self.machine.divides_at_once, what=instruction)

    def end(self) -> None:
        """The optimizer writes the gradients that were sent."""
        self._end(waits=True, what=OPTIMIZER)

    def _end(self, waits: bool, what: Work) -> None:
        for over in self.sent if waits else ():
            self._wait(over)
        self._op(what)

    def _node(self, before: Iterable[int]) -> int:
        self.graph.before.append(list(before))
        self.graph.at.append((self.number, self.position))
        return len(self.graph.before) - 1

    def _host(self, before: Iterable[int]) -> int:
        node = self._node(before)
        self.graph.hosts.append(node)
        return node

    def _meet(self, key: Hashable, turn: int, begun: int) -> int:
        """The node at which all ranks have begun that meet at this key for this turn."""
        nodes = self.meetings.nodes
        if (key, turn) not in nodes:
            nodes[key, turn] = node = self._node([nodes[key, turn - 1]] if (key, turn - 1) in nodes else [])
            self.graph.streams[node] = key, turn
        self.graph.before[nodes[key, turn]].append(begun)
        return nodes[key, turn]

    def _use(self, what: Channel | Collective) -> None:
        """Connect a channel or a collective where it is used first."""
        if self.connected is not None and what not in self.connected:
            self.connected.add(what)
            # A device may have to be idle when memory for a communicator is allocated.
            begun = self._node([self.host, *self.tails.values()])
            self.host = self._host([self._meet(("connect", what), 0, begun)])

    def _kernel(
        self,
        stream: Hashable,
        what: Work,
        carries: Sequence[Message] = (),
        *,
        meets: Sequence[tuple[Hashable, int]] = (),
        waits: Iterable[int] = (),
    ) -> int:
        """Start a kernel, which meets others; return the node at which it is over."""
        key = self.number, stream
        before = [self.host, *self.ops, *waits, *self.queue]
        if key in self.tails:
            before.append(self.tails[key])
        begun = self._node(before)
        if self.machine.one_queue:
            self.queue = [begun]
        met = [self._meet(*meeting, begun) for meeting in meets]
        over = self._node([begun, *met])
        self.graph.streams[over] = key, self.meetings.next(key)
        self.tails[key] = over
        self.graph.kernels.append(Kernel(self.number, what, begun, tuple(met) or (over,), tuple(carries)))
        return over

    def _op(self, what: Work) -> None:
        ahead = self.machine.run_ahead
        if ahead is not None and len(self.ended) >= ahead:
            self.host = self._host([self.host, self.ended[-ahead]])
        over = self._touch(what)
        self.ended.append(over)
        if self.machine.hosts_wait:
            self.host = self._host([over])

    def _touch(self, what: Work) -> int:
        """A kernel on the stream of the ops."""
        over = self._kernel("ops", what)
        self.ops = [over]
        return over

    def _wait(self, over: int) -> None:
        if self.machine.hosts_wait:
            self.host = self._host([self.host, over])
        else:
            self.ops = [*self.ops, over]

    def _wait_for(self, key: Hashable) -> None:
        """Wait for what was posted or joined; for ever, if it was not."""
        if key not in self.received:
            never = self._node([])
            self.graph.before[never].append(never)
            self.received[key] = never
        self._wait(self.received[key])

    def _message(self, channel: Channel, sends: bool, what: Work, messages: Sequence[Message] = ()) -> int:
        """Send or receive messages, or one of a gradient."""
        self._use(channel)
        over, kernels = -1, self.machine.kernels
        apart = [[message] for message in messages] or [[]]
        for group in apart * kernels if kernels else [messages]:
            turns = [
                (("message", channel), self.meetings.next((channel, sends))) for _ in range(len(group) or 1)
            ]
            over = self._kernel(channel, what, group, meets=turns)
        if sends:
            self.sent.append(over)
            if self.machine.sends_wait:
                self._wait(over)
        return over

    def _all_reduce(self, gradient: AllReduceGradient) -> None:
        first, *others = gradient.ranks
        own = self.number
        if own != first:
            self._message((own, first), True, ("send", gradient, first))
        for other in others if own == first else [first]:
            self._wait(self._message((other, own), False, ("receive", gradient, other)))
            self._op(("take", gradient, other))
        for other in others if own == first else ():
            self._message((own, other), True, ("send", gradient, other))
