"""Lets the processes of a job exchange bytes, tensors and texts outside of steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fxpipe.errors import CallsDifferError
from fxpipe.runtime.job.calls import CALL, SPACE, different_calls, with_call
from fxpipe.runtime.job.last_works import lasting
from fxpipe.runtime.job.numbering import Numbering
from fxpipe.runtime.job.user_line import called_function
from fxpipe.runtime.job.watch import Watch

#: The most characters of one value in a store: torch's ends the connection of a rank that sends it 8 MiB.
MOST_STORED = 1 << 20
_SHORT = 8 * (SPACE - 1)  # bytes that come along with their number


def gather_bytes(data: bytes, sizes: Sequence[int], group: dist.ProcessGroup) -> list[bytes]:
    """The bytes of every rank of a group over gloo, whose sizes are known."""
    part = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    part[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else part[:0]
    padded = [torch.empty_like(part) for _ in sizes]
    lasting(dist.all_gather(padded, part, group, async_op=True), group).wait()
    return [p[:size].numpy().tobytes() for p, size in zip(padded, sizes, strict=True)]


@dataclass(frozen=True, eq=False, kw_only=True)
class Collectives(Numbering):
    """The collectives of a job outside of steps.  ``control``: a group of all ranks over gloo alone, for
    whatever is not a message of a step: no backend of an accelerator ever carries it, wherever its tensors
    are.  ``pipeline``: the same for the ranks of this replica and lane alone.  ``of``: the pipeline whose
    calls these are, as text; "" for those of none yet.

    What ranks exchange begins with the call that they make (:mod:`fxpipe.runtime.job.calls`): that of
    ``begin_gather``, ``gather`` and ``broadcast_bytes``, which raise CallsDifferError on all ranks where they
    make different calls.  ``scatter``, ``broadcast_`` and ``send_to`` follow one of those.
    """

    control: dist.ProcessGroup
    watch: Watch
    of: str = ""
    _pipeline_groups: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """The processes of this replica, for whatever ``control`` is for."""
        return self._pipeline_groups.get((self.ranks, self.lanes), self.control)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Broadcast bytes from rank 0; the other ranks pass None."""
        content = data or b""
        (size, short), *_ = self._exchange(content)
        if size <= _SHORT:
            return short
        payload = torch.empty(size, dtype=torch.uint8, device="cpu")
        if content:
            payload = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        with self.watch.collective():
            lasting(dist.broadcast(payload, 0, self.control, async_op=True), self.control).wait()
        return payload.numpy().tobytes()

    def scatter(self, parts: Iterable[bytes] | None) -> bytes:
        """Give each rank its part; rank 0 has those of all ranks in order, and the others pass None."""
        if parts is None:
            with self.watch.collective():
                size = torch.empty(1, dtype=torch.int64, device="cpu")
                dist.recv(size, 0, self.control)
                received = torch.empty(int(size), dtype=torch.uint8, device="cpu")
                if len(received):
                    dist.recv(received, 0, self.control)
            return received.numpy().tobytes()
        first = b""
        # One after the other, each waited for: this rank holds one part of those that it makes meanwhile.
        for rank, part in enumerate(parts):
            if rank == 0:
                first = part
                continue
            with self.watch.collective():
                dist.send(torch.tensor([len(part)], device="cpu"), rank, self.control)
                if part:
                    dist.send(torch.frombuffer(bytearray(part), dtype=torch.uint8), rank, self.control)
        return first

    def keep(self, key: str, text: str) -> None:
        """Keep a text where each rank can read it, as long as the run lasts."""
        store = self.watch.failures.store
        with self.watch.collective():
            for begin in range(0, len(text), MOST_STORED):
                store.set(f"{key}/{begin}", text[begin : begin + MOST_STORED])
            store.set(key, str(len(text)))

    def kept(self, key: str) -> str:
        """A text that a rank has kept."""
        with self.watch.collective():
            store = self.watch.failures.store
            begins = range(0, int(store.get(key)), MOST_STORED)
            return b"".join(store.get(f"{key}/{begin}") for begin in begins).decode()

    def gather(self, data: bytes) -> list[bytes]:
        """Gather the bytes of every rank on every rank."""
        parts = self._exchange(data)
        sizes = [size for size, _ in parts]
        if max(sizes) <= _SHORT:
            return [short for _, short in parts]
        with self.watch.collective():
            return gather_bytes(data, sizes, self.control)

    def gather_in_replica(self, data: bytes) -> list[bytes]:
        """Gather the bytes of every rank of this replica on its ranks.  All processes call it."""
        parts = self.gather(data)
        return [parts[rank] for rank in self.of_replica(self.replica)]

    def _exchange(self, data: bytes) -> list[tuple[int, bytes]]:
        """The number of bytes of every rank, and the bytes where they are short enough to come along."""
        words = torch.zeros(SPACE, dtype=torch.int64, device="cpu")
        words[0] = len(data)
        if 0 < len(data) <= _SHORT:
            words[1:].view(torch.uint8)[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        table = self.begin_gather(words, called_function())()
        texts = [row[1:].contiguous().numpy().tobytes() for row in table]
        return [(size, text[:size]) for size, text in zip(table[:, 0].tolist(), texts, strict=True)]

    def begin_gather(self, words: torch.Tensor, call: str) -> Callable[[], torch.Tensor]:
        """Start to gather a vector of every rank on every rank; return the function that waits for them.

        words: int64, on the CPU, at most SPACE; the rows of the result have SPACE.  call: the one that all
        ranks make, as text.
        """
        row = with_call(f"{call} of {self.of}" if self.of else call, words)
        table = torch.empty((self.world_size, len(row)), dtype=row.dtype, device="cpu")
        # Of one size for all calls, as a collective of two sizes ends the process inside of the backend.
        work = lasting(dist.all_gather([*table], row, self.control, async_op=True), self.control)

        def compared() -> str | None:
            """Tell the watch of other calls: this rank may wait for a message that no rank sends then."""
            arrived = work.get_future()
            if not arrived.done():
                return None
            with contextlib.suppress(RuntimeError):  # ``gathered`` raises it
                arrived.wait()
                return different_calls(table)
            return None

        self.watch.comparisons.append(compared)

        def gathered() -> torch.Tensor:
            try:
                with self.watch.collective():
                    work.wait()
            finally:
                self.watch.comparisons.remove(compared)
            if problem := different_calls(table):
                raise CallsDifferError(problem)
            return table[:, CALL:]

        return gathered

    def broadcast_(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a tensor with its values on rank ``source``."""
        self._broadcast(tensor, source, self.control)

    def broadcast_in_replica_(self, tensor: torch.Tensor, rank: int) -> None:
        """Overwrite a tensor with its values on a rank of this replica; all of its ranks call it."""
        self._broadcast(tensor, self.of_replica(self.replica)[rank], self.pipeline)

    def _broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
        value = tensor.contiguous().cpu()  # gloo's groups send from there
        with self.watch.collective():
            lasting(dist.broadcast(value, source, group, async_op=True), group).wait()
        if value is not tensor:
            tensor.copy_(value)

    def send_to(self, tensor: torch.Tensor, source: int, target: int) -> None:
        """Overwrite a tensor on rank ``target`` with its values on rank ``source``; both call it."""
        value = tensor.contiguous().cpu()
        flat = value.reshape(-1).view(torch.uint8)  # gloo does not take all dtypes
        with self.watch.collective():
            if self.world_rank == source:
                dist.send(flat, target, self.control)
                return
            dist.recv(flat, source, self.control)
        if value is not tensor:
            tensor.copy_(value)
