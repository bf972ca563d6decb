"""Runs all ranks in this process, in turns (``turns.py``), and carries the messages between them.

For tests and debuggers: the programs and the resulting bits are the same as under torchrun.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from fxpipe.errors import DeadlockError, RunError
from fxpipe.plan.tensors import sum_over_ranks
from fxpipe.runtime.program.comm import Layout, Numbers, Pending, in_memory_order
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
        return FlatMessage(flat, (tuple(tensor.shape), tensor.stride(), tensor.dtype))


WaitUntil = Callable[[Callable[[], bool], int, str], None]
"""Lets other ranks go on until something is over, for a rank; ``what``: that, as text."""


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
        # (group, number) -> the tensors by rank, and the number of ranks that have not taken them yet
        self.joint: dict[tuple[Hashable, int], dict[int, FlatMessage]] = {}
        self.takers: dict[tuple[Hashable, int], int] = {}
        #: (lanes of a rank, number) -> what each lane has given
        self.between: dict[tuple[Hashable, int], dict[int, list[torch.Tensor]]] = {}
        self.shared: dict[int, Numbers] = {}  # of the loss ranks

    def number(self, rank: int, replica: int, lane: int) -> int:
        return (replica * self.ranks + rank) * self.lanes + lane


def _expected(layout: Layout) -> torch.Tensor:
    shape, stride, dtype = layout
    with no_modes():
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


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
        self._joined: Counter[int] = Counter()

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
        layout = (tuple(expected.shape), expected.stride(), expected.dtype)
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

    def broadcast(
        self, tensor: torch.Tensor | None, layout: Layout, source: int, group: int
    ) -> Pending | None:
        key = self._join(tensor, group)
        others = self._world.ranks - 1
        return self._pending(layout, source, key, [source], others) if tensor is None else None

    def gather(self, tensor: torch.Tensor, layout: Layout, to: int, group: int) -> Pending | None:
        key = self._join(tensor, group)
        everyone = list(range(self._world.ranks))
        return self._pending(layout, -1, key, everyone, 1) if self._rank == to else None

    def all_gather(self, tensor: torch.Tensor, layout: Layout, group: int) -> Pending:
        ranks = self._world.ranks
        return self._pending(layout, -1, self._join(tensor, group), list(range(ranks)), ranks)

    def reduce(self, tensor: torch.Tensor, layout: Layout, to: int, group: int) -> Pending | None:
        pending = self.gather(tensor, layout, to, group)
        return None if pending is None else replace(pending, adds=True)

    def _join(self, tensor: torch.Tensor | None, group: int) -> tuple[Hashable, int]:
        """Join a collective: the n-th of a group on one rank is the n-th of that group on all ranks."""
        key = (self._numbers[0], group), self._joined[group]
        self._joined[group] += 1
        if tensor is not None:
            self._world.joint.setdefault(key, {})[self._rank] = FlatMessage.of(tensor)
        return key

    def _pending(
        self, layout: Layout, source: int, key: tuple[Hashable, int], ranks: list[int], takers: int
    ) -> Pending:
        self._world.takers.setdefault(key, takers)
        return Pending([_expected(layout)] * len(ranks), source, (key, ranks))

    def _wait_for_collective(self, pending: Pending) -> list[torch.Tensor]:
        key, ranks = pending.work
        joint = self._world.joint
        what = "all ranks" if pending.source < 0 else f"rank {self._numbers[pending.source]}"
        self._world.wait_until(lambda: all(r in joint.get(key, {}) for r in ranks), self._number, what)
        self._world.takers[key] -= 1
        sent = joint.pop(key) if not self._world.takers[key] else joint[key]  # the last taker frees it
        parts = [
            self._received_as(replace(sent[r], flat=sent[r].flat.clone()), expected, r)
            for r, expected in zip(ranks, pending.buffers, strict=True)
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
