"""Runs all ranks in this process, in turns (``turns.py``), and carries the messages between them.

For tests and debuggers: the programs and the resulting bits are the same as under torchrun.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe.errors import DeadlockError, RunError
from fxpipe.plan.tensors import sum_over_ranks
from fxpipe.runtime.program.comm import (
    Collective,
    Layout,
    Numbers,
    Pending,
    gets_values,
    in_memory_order,
    new_buffer,
)
from fxpipe.runtime.torch_private import no_modes


@dataclass(frozen=True, eq=False)
class FlatMessage:
    """The contents of a message in flight: a flat copy, and its layout."""

    flat: torch.Tensor
    layout: Layout

    @staticmethod
    def of(tensor: torch.Tensor) -> FlatMessage:
        with no_modes():  # a mode on this thread must see this rank's own tensors only
            flat = in_memory_order(tensor).clone()
        return FlatMessage(flat, layout_of(tensor))


WaitUntil = Callable[[Callable[[], bool], int, str], None]
"""Lets other ranks go on until something is over, for a rank; ``what``: that, as text."""


Joint = tuple[Hashable, int]
"""A group, and the number of an operation of its members."""


def _wait_alone(is_over: Callable[[], bool], rank: int, what: str) -> None:
    if not is_over():
        raise DeadlockError(f"Rank {rank} waits for {what}, and runs alone.")


class LocalWorld:
    """State shared by the ranks of one process: the messages between them.

    ``wait_until``: of the ranks that take turns, as ``turns.run_all`` sets it.

    With replicas and lanes it is a world of ``ranks`` * ``replicas`` * ``lanes``, and its ranks have their
    numbers in that.
    """

    def __init__(self, ranks: int, replicas: int = 1, lanes: int = 1):
        self.ranks, self.replicas, self.lanes = ranks, replicas, lanes
        self.wait_until: WaitUntil = _wait_alone
        self.messages: dict[tuple[int, int, int], FlatMessage] = {}  # (from, to, number) -> a tensor
        self.shared: dict[int, Numbers] = {}  # of the loss ranks
        # What each member of a group has given to an operation of all, by the number of that, and how many
        # have taken it.
        self._contributed: defaultdict[Joint, dict[int, Any]] = defaultdict(dict)
        self._taken: Counter[Joint] = Counter()
        self._joined: Counter[tuple[Hashable, int]] = Counter()

    def number(self, rank: int, replica: int, lane: int) -> int:
        return (replica * self.ranks + rank) * self.lanes + lane

    def join(self, group: Hashable, member: int, contribution: object) -> Joint:
        """Join an operation: the n-th of a group on one member is the n-th of that group on all of them.

        contribution: to it; None for a member that only takes.
        """
        joint = group, self._joined[group, member]
        self._joined[group, member] += 1
        if contribution is not None:
            self._contributed[joint][member] = contribution
        return joint

    def take(self, joint: Joint, members: Sequence[int], takers: int, rank: int, what: str) -> list[Any]:
        """What these members have given to an operation.  takers: the number of those that take something.
        rank, what: see ``WaitUntil``."""
        contributions = self._contributed[joint]
        self.wait_until(lambda: contributions.keys() >= {*members}, rank, what)
        self._taken[joint] += 1
        if self._taken[joint] == takers:  # the last one frees it
            del self._contributed[joint], self._taken[joint]
        return [contributions[member] for member in members]


def _expected(layout: Layout) -> torch.Tensor:
    with no_modes():  # a measurement of memory would count it
        return new_buffer(layout, torch.device("meta"))


def layout_of(tensor: torch.Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def text_of(layout: Layout) -> str:
    return " ".join(map(str, layout))


class LocalComm:
    """Communication between the ranks of a replica in a LocalWorld."""

    def __init__(self, world: LocalWorld, rank: int, replica: int = 0, lane: int = 0):
        self._world, self._rank, self._lane = world, rank, lane
        self._numbers = [world.number(k, replica, lane) for k in range(world.ranks)]  # in the world
        self._number = self._numbers[rank]
        self._received: Counter[int] = Counter()
        self._sent: Counter[int] = Counter()

    def start(self) -> None:
        self._world.shared.pop(self._number, None)  # a rank would take that of the last step

    def receive(self, layouts: Sequence[Layout], source: int) -> Pending:
        # The n-th tensor of all posted receives is the n-th that is sent, however the program waits.
        first = self._received[source]
        self._received[source] += len(layouts)
        numbers = range(first, self._received[source])
        return Pending([_expected(layout) for layout in layouts], source, numbers)

    def wait(self, pending: Pending) -> list[torch.Tensor]:
        if isinstance(pending.work, tuple):
            return self._wait_for_collective(pending)
        messages, source = self._world.messages, pending.source
        sender = self._numbers[source]
        keys = [(sender, self._number, number) for number in pending.work]
        self._world.wait_until(lambda: all(key in messages for key in keys), self._number, f"rank {sender}")
        pairs = zip(keys, pending.buffers, strict=True)
        return [self._received_as(messages.pop(key), expected, source) for key, expected in pairs]

    def _received_as(self, sent: FlatMessage, expected: torch.Tensor, source: int) -> torch.Tensor:
        layout = layout_of(expected)
        if sent.layout != layout:
            raise RunError(
                f"Rank {self._numbers[source]} sent a tensor of shape, strides and dtype "
                f"{text_of(sent.layout)}, and rank {self._number} expects {text_of(layout)}. Edit both "
                "programs alike."
            )
        return sent.flat.as_strided(expected.shape, expected.stride())

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        for tensor in tensors:
            self._world.messages[self._number, self._numbers[to], self._sent[to]] = FlatMessage.of(tensor)
            self._sent[to] += 1

    def collective(
        self, verb: Collective, tensor: torch.Tensor | None, layout: Layout, root: int, group: int
    ) -> Pending | None:
        contribution = None if tensor is None else FlatMessage.of(tensor)
        joint = self._world.join((self._numbers[0], group), self._rank, contribution)
        if not gets_values(verb, tensor, root, self._rank):
            return None
        ranks, source = range(self._world.ranks), root if verb == "broadcast" else -1
        senders = ranks if source < 0 else [source]
        takers = {"broadcast": len(ranks) - 1, "all_gather": len(ranks)}.get(verb, 1)
        buffers = [_expected(layout)] * len(senders)
        return Pending(buffers, source, (joint, senders, takers), tensor, adds=verb == "reduce")

    def _wait_for_collective(self, pending: Pending) -> list[torch.Tensor]:
        joint, senders, takers = pending.work
        what = "all ranks" if pending.source < 0 else f"rank {self._numbers[pending.source]}"
        sent = self._world.take(joint, senders, takers, self._number, what)
        parts = [
            self._received_as(replace(one, flat=one.flat.clone()), expected, rank)
            for one, expected, rank in zip(sent, pending.buffers, senders, strict=True)
        ]
        return [sum_over_ranks(*parts)] if pending.adds else parts

    def share_numbers(self, numbers: Numbers | None, source: int) -> Numbers:
        if numbers is not None:
            self._world.shared[self._number] = numbers
        world, shared = self._world, self._world.shared
        sources = [world.number(source, replica, self._lane) for replica in range(world.replicas)]

        def total() -> torch.Tensor:
            what = f"the loss of rank {' and '.join(map(str, sources))}"
            world.wait_until(lambda: shared.keys() >= {*sources}, self._number, what)
            return torch.stack([shared[rank]() for rank in sources]).sum(0)

        return total

    def flush(self) -> None:
        pass
