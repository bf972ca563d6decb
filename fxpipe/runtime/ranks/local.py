"""Runs all ranks in this process: one thread per rank, one running at a time; a rank that must wait yields.

For tests and debuggers: the programs and the resulting bits are the same as under torchrun.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe.errors import DeadlockError, FxpipeError, RunError
from fxpipe.plan.tensors import sum_over_ranks
from fxpipe.runtime.program.accelerator import select
from fxpipe.runtime.program.comm import Layout, Numbers, Pending, in_memory_order
from fxpipe.runtime.torch_private import no_modes


@dataclass(frozen=True, eq=False)
class Contents:
    """The contents of a message in flight: a flat copy, and its layout."""

    flat: torch.Tensor
    layout: Layout

    @staticmethod
    def of(tensor: torch.Tensor) -> Contents:
        with no_modes():  # a mode on this thread must see this rank's own tensors only
            flat = in_memory_order(tensor).clone()
        return Contents(flat, (tuple(tensor.shape), tensor.stride(), tensor.dtype))


class LocalWorld:
    """State shared by the ranks of one process: the messages between them, and the rank whose turn it is.

    With replicas and lanes it is a world of ``ranks`` * ``replicas`` * ``lanes``, and its ranks have their
    numbers in that.
    """

    def __init__(self, ranks: int, replicas: int = 1, lanes: int = 1):
        self.ranks, self.replicas, self.lanes = ranks, replicas, lanes
        self.size = ranks * replicas * lanes
        self.turn = threading.Condition()  # held by the rank that runs
        self.messages: dict[tuple[int, int, int], Contents] = {}  # (from, to, number) -> a tensor
        # (group, number) -> the tensors by rank, and the number of ranks that have not taken them yet
        self.joint: dict[tuple[Hashable, int], dict[int, Contents]] = {}
        self.takers: dict[tuple[Hashable, int], int] = {}
        #: (lanes of a rank, number) -> what each lane has given
        self.between: dict[tuple[Hashable, int], dict[int, list[torch.Tensor]]] = {}
        self.shared: dict[int, torch.Tensor] = {}  # broadcast by the loss rank, until all ranks have it
        self.waiting: dict[int, str] = {}
        self.running = self.size
        self.failed: tuple[int, BaseException] | None = None

    def number(self, rank: int, replica: int, lane: int) -> int:
        return (replica * self.ranks + rank) * self.lanes + lane

    def wait_until(self, ready: Callable[[], bool], rank: int, what: str) -> None:
        while not ready():
            self.waiting[rank] = what
            if len(self.waiting) == self.running and self.failed is None:
                lines = "\n".join(f"  rank {r} waits for {w}" for r, w in sorted(self.waiting.items()))
                self.failed = (rank, DeadlockError(f"All ranks wait:\n{lines}"))
            if self.failed is not None:
                self.turn.notify_all()
                raise _Stopped
            self.turn.wait()
        self.waiting.pop(rank, None)

    def woken(self) -> None:
        """Wake the waiting ranks, which do not count as waiting until they have checked again."""
        with self.turn:
            self.waiting.clear()
            self.turn.notify_all()


def _expected(layout: Layout) -> torch.Tensor:
    shape, stride, dtype = layout
    with no_modes():
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def text_of(layout: Layout) -> str:
    return " ".join(map(str, layout))


class _Stopped(Exception):
    """Ends a rank's thread after another rank failed."""


class LocalComm:
    """Communication between the ranks of a replica in a LocalWorld."""

    def __init__(self, world: LocalWorld, rank: int, replica: int = 0, lane: int = 0):
        self._world, self._rank, self._lane = world, rank, lane
        self._numbers = [world.number(k, replica, lane) for k in range(world.ranks)]  # in the world
        self._own = self._numbers[rank]
        self._received: Counter[int] = Counter()
        self._sent: Counter[int] = Counter()
        self._joined: Counter[int] = Counter()

    def start(self) -> None:
        pass

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
        keys = [(sender, self._own, number) for number in pending.work]
        self._world.wait_until(lambda: all(key in messages for key in keys), self._own, f"rank {sender}")
        pairs = zip(keys, pending.buffers, strict=True)
        return [self._received_as(messages.pop(key), expected, source) for key, expected in pairs]

    def _received_as(self, sent: Contents, expected: torch.Tensor, source: int) -> torch.Tensor:
        layout = (tuple(expected.shape), expected.stride(), expected.dtype)
        if sent.layout != layout:
            raise RunError(
                f"Rank {source} sent a tensor of shape, strides and dtype {text_of(sent.layout)}, and rank "
                f"{self._rank} expects {text_of(layout)}. Edit both programs alike."
            )
        return sent.flat.as_strided(expected.shape, expected.stride())

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        for tensor in tensors:
            self._world.messages[self._own, self._numbers[to], self._sent[to]] = Contents.of(tensor)
            self._sent[to] += 1
        self._world.woken()

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
            self._world.joint.setdefault(key, {})[self._rank] = Contents.of(tensor)
            self._world.woken()
        return key

    def _pending(
        self, layout: Layout, source: int, key: tuple[Hashable, int], ranks: list[int], takers: int
    ) -> Pending:
        self._world.takers.setdefault(key, takers)
        return Pending([_expected(layout)] * len(ranks), source, (key, ranks))

    def _wait_for_collective(self, pending: Pending) -> list[torch.Tensor]:
        key, ranks = pending.work
        joint, what = self._world.joint, "all ranks" if pending.source < 0 else f"rank {pending.source}"
        self._world.wait_until(lambda: all(r in joint.get(key, {}) for r in ranks), self._own, what)
        self._world.takers[key] -= 1
        given = joint.pop(key) if not self._world.takers[key] else joint[key]
        found = [
            self._received_as(replace(given[r], flat=given[r].flat.clone()), expected, r)
            for r, expected in zip(ranks, pending.buffers, strict=True)
        ]
        return [sum_over_ranks(*found)] if pending.adds else found

    def share_numbers(self, given: Numbers | None, source: int) -> Numbers:
        if given is not None:
            self._world.shared[self._own] = given()
            self._world.woken()
        world, shared = self._world, self._world.shared
        sources = [world.number(source, replica, self._lane) for replica in range(world.replicas)]

        def found() -> torch.Tensor:
            what = f"the loss of rank {' and '.join(map(str, sources))}"
            world.wait_until(lambda: shared.keys() >= {*sources}, self._own, what)
            return torch.stack([shared[rank] for rank in sources]).sum(0)

        return found

    def flush(self) -> None:
        pass


def run_all(
    world: LocalWorld,
    rank_mains: list[Callable[[], Any]],
    where: Callable[[int], str],
    threads: int,
    device: torch.device,
) -> list[Any]:
    """Run one function per rank of the world; return their results.

    where: rank -> the op that it is running, for the message of the RunError if the rank fails.
    threads: number of intra-op threads of each rank.  device: on which all of them compute.
    """
    results: list[Any] = [None] * world.size

    def main(rank: int) -> None:
        with world.turn:
            try:
                torch.set_num_threads(threads)
                select(device)
                with torch.no_grad():
                    results[rank] = rank_mains[rank]()
            except _Stopped:
                pass
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                if world.failed is None:
                    world.failed = (rank, error)
            finally:
                world.running -= 1
                world.woken()

    workers = [
        threading.Thread(target=main, args=(r,), name=f"fxpipe-rank{r}", daemon=True)
        for r in range(world.size)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if world.failed is not None:
        rank, error = world.failed
        if isinstance(error, FxpipeError):
            raise error
        raise RunError(f"Rank {rank} failed in {where(rank)}: {type(error).__name__}: {error}") from error
    return results
