"""Races: two accesses of a storage, one of which writes, that nothing orders.

The order is that of an execution's graph, found with vector clocks: per node the number of kernels of each
stream, and of messages of each channel, that are over before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, repeat

import numpy as np

from fxpipe.schedule.lowering.execution import Execution, Kernel, Machine, Work, execution
from fxpipe.schedule.lowering.lower import (
    AllReduceGradient,
    Collective,
    CollectiveKind,
    Compute,
    DivideGradients,
    Instruction,
    PostRecv,
    Programs,
    Send,
    StartCollective,
    StartTransfer,
    WaitTransfer,
)
from fxpipe.schedule.ops import PHASES, Activation, Color, Direction, Op, arrival

Places = Sequence[Mapping[Activation, Iterable[Hashable]]]
"""Per rank the parts of the offload pool that an activation takes."""


@dataclass(frozen=True, slots=True)
class Access:
    """A kernel of ``rank`` reads or writes a storage of that rank, between two nodes of the graph."""

    rank: int
    storage: Hashable
    writes: bool
    begun: int
    over: int
    what: Work


def races(
    programs: Programs, placement: Sequence[int], machine: Machine, places: Places | None = None
) -> list[tuple[Access, Access]]:
    """The pairs of accesses that nothing orders, in an execution that ends."""
    graph = execution(programs, placement, machine)
    clocks = _clocks(graph)
    ranks = [_Storages(programs[k], placement, k, places[k] if places else {}) for k in range(len(programs))]
    found: defaultdict[tuple[int, Hashable], list[Access]] = defaultdict(list)
    for kernel in graph.kernels:
        for access in ranks[kernel.rank].accesses(kernel):
            found[access.rank, access.storage].append(access)

    def is_before(a: Access, b: Access) -> bool:
        return bool((clocks[b.begun] >= clocks[a.over]).all())

    return [
        (a, b)
        for accesses in found.values()
        for a, b in combinations(accesses, 2)
        if (a.writes or b.writes) and not is_before(a, b) and not is_before(b, a)
    ]


class _Storages:
    """The storages of a rank, and the kernels that access them."""

    def __init__(
        self,
        program: Sequence[Instruction],
        placement: Sequence[int],
        rank: int,
        places: Mapping[Activation, Iterable[Hashable]],
    ) -> None:
        self.placement, self.rank, self.places = placement, rank, places
        self.read = _read_by(program, placement, rank)
        self.summed = [i.name for i in program if isinstance(i, AllReduceGradient)]

    def accesses(self, kernel: Kernel) -> Iterator[Access]:
        over = kernel.over if kernel.carries else repeat(kernel.over[0])
        for (storage, writes), done in zip(self._touched(kernel), over, strict=False):
            yield Access(self.rank, storage, writes, kernel.begun, done, kernel.what)

    def _touched(self, kernel: Kernel) -> list[tuple[Hashable, bool]]:
        """The storages that a kernel accesses, and whether it writes them."""
        match kernel.what:
            case Compute(op):
                return [(storage, False) for storage in self.read[op]]
            case PostRecv() | Send():
                return [(message, isinstance(kernel.what, PostRecv)) for message in kernel.carries]
            case StartCollective(collective, m):
                receives = _receives(collective, self.placement, self.rank)
                return [(("collective" if receives else "contribution", collective.number, m), receives)]
            case StartTransfer(transfer):
                activation, out = transfer.activation, transfer.direction is Direction.OUT
                pool = [(("pool", place), out) for place in self.places.get(activation, ())]
                return [(("saved" if out else "reloaded", activation), not out), *pool]
            case WaitTransfer(transfer):
                return [(("saved", transfer.activation), True)]
            case ("send", AllReduceGradient(name, _), _):
                return [(("gradient", name), False)]
            case ("receive", AllReduceGradient(name, _), other):
                return [(("sum", name, other), True)]
            case ("take", AllReduceGradient(name, _), other):
                return [(("sum", name, other), False), (("gradient", name), True)]
            case DivideGradients() | str():
                return [(("gradient", name), True) for name in self.summed]
        raise AssertionError(kernel)


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
