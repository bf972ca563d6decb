"""How ranks talk: one protocol, over torch.distributed or inside one process.

Messages from one rank to another arrive in the order in which they were sent.  ``send`` and
``receive`` do not block; ``wait`` does, for at most the time limit.
"""

from __future__ import annotations

import atexit
import queue
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fxpipe.errors import RunError
from fxpipe.values import in_strides

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""How a message lies in memory on both sides: shape, strides, dtype."""


@dataclass(eq=False)
class Pending:
    """A message that is being received; ``work`` is what its Comm knows it by."""

    buffer: torch.Tensor
    source: int
    work: Any = None


class Comm(Protocol):
    def receive(self, layout: Layout, source: int) -> Pending: ...

    def wait(self, pending: Pending) -> torch.Tensor: ...

    def send(self, tensor: torch.Tensor, to: int) -> None: ...

    def broadcast(self, tensor: torch.Tensor | None, source: int) -> torch.Tensor:
        """Two float64 numbers on the CPU, given on ``source`` alone."""
        ...

    def flush(self) -> None:
        """Return when all that was sent has left."""
        ...


def in_layout(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor, copied if it lies in memory otherwise (kernels do not always give the traced strides).

    Raises RunError if it has another shape or dtype.
    """
    shape, stride, dtype = layout
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise RunError(
            f"A message is to be a tensor of shape {shape} and {dtype}, and what is sent has shape "
            f"{tuple(tensor.shape)} and {tensor.dtype}."
        )
    return in_strides(tensor, stride)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as they lie in memory, as one contiguous dimension."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


@dataclass(eq=False)
class DistributedComm:
    """Over torch.distributed: nccl between GPUs, gloo otherwise (also for ranks that share a GPU).

    A receive posted early must not hold up a later send: every direction between two neighbours has its
    own communicator under nccl (``channels``: all ordered pairs of ranks that talk, the same on all).
    """

    device: torch.device
    rank: int
    channels: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        self._gloo = dist.get_backend() == "gloo"
        self._groups: dict[tuple[int, int], Any] = {}
        if not self._gloo:
            self._groups = {pair: dist.new_group(list(pair)) for pair in self.channels}
        self._leaving = _Leaving()

    def receive(self, layout: Layout, source: int) -> Pending:
        shape, stride, dtype = layout
        device = torch.device("cpu") if self._gloo else self.device
        buffer = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        group = self._groups.get((source, self.rank))
        return Pending(buffer, source, dist.irecv(in_memory_order(buffer), source, group=group))

    def wait(self, pending: Pending) -> torch.Tensor:
        try:
            pending.work.wait()
        except RuntimeError as error:
            raise RunError(f"Nothing came from rank {pending.source}: {error}") from error
        return pending.buffer.to(self.device)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        flat = in_memory_order(tensor)
        if self._gloo:
            flat = flat.cpu()
        self._leaving.add(dist.isend(flat, to, group=self._groups.get((self.rank, to))), flat)

    def broadcast(self, tensor: torch.Tensor | None, source: int) -> torch.Tensor:
        value = torch.empty(2, dtype=torch.float64) if tensor is None else tensor
        value = value if self._gloo else value.to(self.device)
        dist.broadcast(value, source)
        return value.cpu()

    def flush(self) -> None:
        self._leaving.join()


class _Leaving:
    """Holds what is being sent until it has left.  Gloo's sends cannot be polled, so a thread waits."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._error: Exception | None = None
        thread = threading.Thread(target=self._run, name="fxpipe-sends", daemon=True)
        thread.start()

        def stop() -> None:  # a thread inside torch when the interpreter ends would abort the process
            self._queue.put(None)
            thread.join(1.0)

        atexit.register(stop)

    def add(self, work: Any, tensor: torch.Tensor) -> None:
        self._queue.put((work, tensor))

    def join(self) -> None:
        done = threading.Event()
        self._queue.put(done)
        done.wait()
        if self._error is not None:
            raise RunError(f"A message could not be sent: {self._error}") from self._error

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                item[0].wait()
            except RuntimeError as error:  # the peer is gone; reported at the end of the step
                self._error = error
            del item
