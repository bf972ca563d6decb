"""Runs all ranks in this process: one thread per rank, one running at a time; a rank that must wait yields.

For tests and debuggers: the programs and the resulting bits are the same as under torchrun.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe.errors import DeadlockError, FxpipeError, RunError
from fxpipe.plan.tensors import sum_over_ranks
from fxpipe.runtime.program.accelerator import select
from fxpipe.runtime.program.comm import Layout, Pending, in_memory_order
from fxpipe.runtime.torch_private import no_modes


@dataclass(frozen=True, eq=False)
class _Contents:
    """The contents of a message in flight: a flat copy, and its layout."""

    flat: torch.Tensor
    layout: Layout

    @staticmethod
    def of(tensor: torch.Tensor) -> _Contents:
        with no_modes():  # a mode on this thread must see this rank's own tensors only
            flat = in_memory_order(tensor).clone()
        return _Contents(flat, (tuple(tensor.shape), tensor.stride(), tensor.dtype))


class LocalWorld:
    """State shared by the ranks of one process: the messages between them, and the rank whose turn it is."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.turn = threading.Condition()  # held by the rank that runs
        self.messages: dict[tuple[int, int, int], _Contents] = {}  # (from, to, number) -> a tensor
        # (group, number) -> the tensors by rank, and the number of ranks that have not taken them yet
        self.joint: dict[tuple[int, int], dict[int, _Contents]] = {}
        self.takers: dict[tuple[int, int], int] = {}
        self.shared: dict[int, torch.Tensor] = {}  # broadcast by the loss rank, until all ranks have it
        self.waiting: dict[int, str] = {}
        self.running = ranks
        self.failed: tuple[int, BaseException] | None = None

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


def _text(layout: Layout) -> str:
    return " ".join(map(str, layout))


class _Stopped(Exception):
    """Ends a rank's thread after another rank failed."""


class LocalComm:
    """Communication between the ranks of a LocalWorld."""

    def __init__(self, world: LocalWorld, rank: int):
        self._world, self._rank = world, rank
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
        keys = [(source, self._rank, number) for number in pending.work]
        self._world.wait_until(lambda: all(key in messages for key in keys), self._rank, f"rank {source}")
        pairs = zip(keys, pending.buffers, strict=True)
        return [self._received_as(messages.pop(key), expected, source) for key, expected in pairs]

    def _received_as(self, sent: _Contents, expected: torch.Tensor, source: int) -> torch.Tensor:
        layout = (tuple(expected.shape), expected.stride(), expected.dtype)
        if sent.layout != layout:
            raise RunError(
                f"Rank {source} sent a tensor of shape, strides and dtype {_text(sent.layout)}, and rank "
                f"{self._rank} expects {_text(layout)}. Edit both programs alike."
            )
        return sent.flat.as_strided(expected.shape, expected.stride())

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        for tensor in tensors:
            self._world.messages[self._rank, to, self._sent[to]] = _Contents.of(tensor)
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

    def _join(self, tensor: torch.Tensor | None, group: int) -> tuple[int, int]:
        """Join a collective: the n-th of a group on one rank is the n-th of that group on all ranks."""
        key = group, self._joined[group]
        self._joined[group] += 1
        if tensor is not None:
            self._world.joint.setdefault(key, {})[self._rank] = _Contents.of(tensor)
            self._world.woken()
        return key

    def _pending(
        self, layout: Layout, source: int, key: tuple[int, int], ranks: list[int], takers: int
    ) -> Pending:
        self._world.takers.setdefault(key, takers)
        return Pending([_expected(layout)] * len(ranks), source, (key, ranks))

    def _wait_for_collective(self, pending: Pending) -> list[torch.Tensor]:
        key, ranks = pending.work
        joint, what = self._world.joint, "all ranks" if pending.source < 0 else f"rank {pending.source}"
        self._world.wait_until(lambda: all(r in joint.get(key, {}) for r in ranks), self._rank, what)
        self._world.takers[key] -= 1
        given = joint.pop(key) if not self._world.takers[key] else joint[key]
        found = [
            self._received_as(replace(given[r], flat=given[r].flat.clone()), expected, r)
            for r, expected in zip(ranks, pending.buffers, strict=True)
        ]
        return [sum_over_ranks(*found)] if pending.adds else found

    def broadcast_numbers(self, tensor: torch.Tensor | None, source: int) -> torch.Tensor:
        if tensor is not None:
            self._world.shared[source] = tensor
            self._world.woken()
        self._world.wait_until(lambda: source in self._world.shared, self._rank, f"the loss of rank {source}")
        return self._world.shared[source]

    def flush(self) -> None:
        pass


def run_all(
    world: LocalWorld,
    rank_mains: list[Callable[[], Any]],
    where: Callable[[int], str],
    threads: int,
    device: torch.device,
) -> list[Any]:
    """Run one function per rank; return their results.

    where: rank -> the op that it is running, for the message of the RunError if the rank fails.
    threads: number of intra-op threads of each rank.  device: on which all of them compute.
    """
    results: list[Any] = [None] * world.ranks

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
        for r in range(world.ranks)
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
