"""Races: two accesses of a storage, one of which writes, that nothing orders.

The order is that of an execution's graph, found with vector clocks: per node the number of kernels of each
stream, and of messages of each channel, that are over before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, repeat

import numpy as np
from on_device import OnDevice

from fxpipe.schedule.lowering.execution import Execution, execution
from fxpipe.schedule.lowering.instructions import (
    AllReduceGradient,
    Collective,
    CollectiveKind,
    Compute,
    DivideGradients,
    Instruction,
    PostRecv,
    Programs,
    ReduceGradients,
    Send,
    StartCollective,
    StartTransfer,
    WaitTransfer,
)
from fxpipe.schedule.ops import PHASES, Activation, Color, Direction, Op, Phase, arrival

Places = Sequence[Mapping[Activation, Iterable[Hashable]]]
"""Per rank the parts of the offload pool that an activation takes."""

Accesses = list[tuple[Hashable, bool]]
"""Of a kernel: storages, and whether it writes; each of a kernel that meets others at one of these."""


@dataclass(frozen=True, slots=True)
class Access:
    """A kernel of ``rank`` reads or writes a storage of that rank, between two nodes of the graph."""

    rank: int
    storage: Hashable
    writes: bool
    begun: int
    over: int
    what: Instruction | str


class Recorded(OnDevice):
    """A rank that adds the accesses of its kernels to ``found``.

    ``coming``: of the kernels that the instruction is about to start.
    """

    run_ahead = None  # nothing but what streams and events promise

    def __init__(self, *arguments, found: list[Access], places: Places | None) -> None:
        super().__init__(*arguments)
        self.found, self.places = found, None if places is None else places[self.number]
        self.read = _read_by(self.program, self.placement, self.number)
        self.summed: list[Hashable] = []
        self.buckets = {op.stage: k for k, op in enumerate(last_gradients(_ops(self.program)))}
        self.what: Instruction | str = ""
        self.coming: Iterator[tuple[Accesses, Instruction | str]] = iter(())

    def run(self, position: int, instruction: Instruction) -> None:
        self.what, self.coming = instruction, self._of(instruction)
        super().run(position, instruction)
        match instruction:
            case WaitTransfer(transfer) if transfer.direction is Direction.OUT:
                # Its memory is free for what comes next.
                self.coming = iter([([(("saved", transfer.activation), True)], f"reuse {transfer}")])
                self.ops = [self.kernel("ops")]
        self.what = "the optimizer"

    def end(self) -> None:
        changed = [("gradient", name) for name in self.summed] + self._summed_in_buckets()
        self.coming = iter([([(storage, True) for storage in changed], self.what)])
        super().end()

    def kernel(self, stream: Hashable, **options) -> int:
        over = super().kernel(stream, **options)
        accesses, what = next(self.coming)
        begun, *met = self.graph.before[over]
        for (storage, writes), done in zip(accesses, met or repeat(over), strict=False):
            self.found.append(Access(self.number, storage, writes, begun, done, what))
        return over

    def _summed_in_buckets(self) -> list[Hashable]:
        return [("bucket", i.bucket) for i in self.program if isinstance(i, ReduceGradients)]

    def _of(self, instruction: Instruction) -> Iterator[tuple[Accesses, Instruction | str]]:
        match instruction:
            case Compute(op):
                own: Accesses = [(storage, False) for storage in self.read.get(op, ())]
                if Phase.W in PHASES[op.kind]:
                    own.append((("bucket", self.buckets[op.stage]), True))
                yield own, instruction
            case ReduceGradients(bucket):
                yield [(("bucket", bucket), True)], instruction
            case PostRecv(messages):
                yield [(message, True) for message in messages], instruction
            case Send(messages):
                yield [(message, False) for message in messages], instruction
            case StartCollective(collective, m):
                receives = _receives(collective, self.placement, self.number)
                storage = "collective" if receives else "contribution", collective.number, m
                yield [(storage, receives)], instruction
            case StartTransfer(transfer):
                out, activation = transfer.direction is Direction.OUT, transfer.activation
                own = [(("saved" if out else "reloaded", activation), not out)]
                if self.places is not None:
                    own += [(("pool", place), out) for place in self.places[activation]]
                yield own, instruction
            case AllReduceGradient(name, ranks):
                self.summed.append(name)
                yield from self._of_sum(name, ranks)

    def _of_sum(self, name: str, ranks: tuple[int, ...]) -> Iterator[tuple[Accesses, str]]:
        is_first, gradient = self.number == ranks[0], ("gradient", name)
        if not is_first:
            yield [(gradient, False)], f"send the gradient of {name}"
        for other in ranks[1:] if is_first else ranks[:1]:
            buffer, what = ("sum", name, other), f"the gradient of {name} from rank {other}"
            yield [(buffer, True)], f"receive {what}"
            yield [(buffer, False), (gradient, True)], f"take {what}"
        for _ in ranks[1:] if is_first else ():
            yield [(gradient, False)], f"send the sum of the gradients of {name}"


def last_gradients(ops: Iterable[Op]) -> list[Op]:
    """Of each stage the last op that adds to its gradients, in their order."""
    return sorted({op.stage: op for op in ops if Phase.W in PHASES[op.kind]}.values(), key=[*ops].index)


def _ops(program: Iterable[Instruction]) -> list[Op]:
    return [i.op for i in program if isinstance(i, Compute)]


class DividesAtOnce(Recorded):
    """Divides gradients while they are sent."""

    def end(self) -> None:
        sent = self.sent
        if isinstance(self.what, DivideGradients):
            self.sent = []
        super().end()
        self.sent = sent


def races(
    programs: Programs,
    placement: Sequence[int],
    places: Places | None = None,
    rank: Callable[..., Recorded] = Recorded,
) -> list[tuple[Access, Access]]:
    """The pairs of accesses that nothing orders, in programs that end."""
    accesses: list[Access] = []
    graph = execution(programs, placement, rank=partial(rank, found=accesses, places=places))
    clocks = _clocks(graph)
    found: defaultdict[tuple[int, Hashable], list[Access]] = defaultdict(list)
    for access in accesses:
        found[access.rank, access.storage].append(access)

    def is_before(a: Access, b: Access) -> bool:
        return bool((clocks[b.begun] >= clocks[a.over]).all())

    return [
        (a, b)
        for own in found.values()
        for a, b in combinations(own, 2)
        if (a.writes or b.writes) and not is_before(a, b) and not is_before(b, a)
    ]


def _clocks(execution: Execution) -> list[np.ndarray]:
    """Per node, by stream and channel, the number of what is over when the node is."""
    columns = {key: k for k, key in enumerate({stream for stream, _ in execution.streams.values()})}
    clocks = [np.zeros(len(columns), np.int32)] * len(execution.before)
    for node in execution.order():
        clock = np.zeros(len(columns), np.int32)
        for other in execution.before[node]:
            np.maximum(clock, clocks[other], out=clock)
        if node in execution.streams:
            stream, position = execution.streams[node]
            clock[columns[stream]] = position + 1
        clocks[node] = clock
    return clocks


def _receives(collective: Collective, placement: Sequence[int], rank: int) -> bool:
    """Whether a rank gets values from a collective; the source of a broadcast has them."""
    gives, takes = (
        any(placement[color.stage] == rank for color in colors)
        for colors in (collective.sources, collective.targets)
    )
    return takes and not (gives and collective.kind is CollectiveKind.BROADCAST)


def _read_by(program: Sequence[Instruction], placement: Sequence[int], rank: int) -> dict[Op, list[Hashable]]:
    """Per op of a program the storages that it reads: messages, results of collectives, reloaded values."""
    ops = {
        (Color(i.op.stage, phase), i.op.microbatch): i.op
        for i in program
        if isinstance(i, Compute)
        for phase in PHASES[i.op.kind]
    }
    found: defaultdict[Op, list[Hashable]] = defaultdict(list)
    for instruction in program:
        match instruction:
            case PostRecv(messages):
                for message in messages:
                    user = ops[arrival(message.edge.target), message.microbatch]
                    found[user].append(message)
            case StartCollective(collective, m) if _receives(collective, placement, rank):
                for color in collective.targets:
                    if placement[color.stage] == rank:
                        found[ops[color, m]].append(("collective", collective.number, m))
            case StartTransfer(transfer) if transfer.direction is Direction.IN:
                user = ops[Color(transfer.stage, transfer.user), transfer.microbatch]
                found[user].append(("reloaded", transfer.activation))
    return found
