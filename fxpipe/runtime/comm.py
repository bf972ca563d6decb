"""Communication between ranks: one protocol, over torch.distributed or inside one process.

Messages from one rank to another arrive in the order in which they were sent.  All ranks take part in the
collectives of a group, in the same order.  Only waits block, for at most the time limit.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fxpipe.errors import RunError
from fxpipe.runtime.tensors import in_strides


class NoAnswer(RunError):
    """Another rank did not send or take a message: it has failed, ended, or is late by the time limit."""


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """Turn the error of a process group whose peer is gone or late into NoAnswer."""
    try:
        yield
    except RuntimeError as error:  # of torch, with the reason as text
        # Without the file of torch's source, and its general advice.
        text = re.sub(r"^\[\S+:\d+\] ", "", str(error)).partition(". This is typically")[0]
        raise NoAnswer(text) from error


Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""The shape, strides and dtype of a message, the same for sender and receiver."""


@dataclass(eq=False)
class Pending:
    """A message being received; ``work`` is the handle of its Comm.

    ``buffers``: one tensor, or one from every rank.  ``source``: the rank that sends, or -1 for all.
    """

    buffers: list[torch.Tensor]
    source: int
    work: Any = None


class Comm(Protocol):
    def receive(self, layout: Layout, source: int) -> Pending: ...

    def wait(self, pending: Pending) -> torch.Tensor: ...

    def send(self, tensor: torch.Tensor, to: int) -> None: ...

    def wait_all(self, pending: Pending) -> list[torch.Tensor]: ...

    def broadcast(
        self, tensor: torch.Tensor | None, layout: Layout, source: int, group: int
    ) -> Pending | None: ...

    def gather(self, tensor: torch.Tensor, layout: Layout, to: int, group: int) -> Pending | None: ...

    def all_gather(self, tensor: torch.Tensor, layout: Layout, group: int) -> Pending: ...

    def broadcast_numbers(self, tensor: torch.Tensor | None, source: int) -> torch.Tensor:
        """Broadcast two float64 numbers on the CPU; only rank ``source`` passes them."""
        ...

    def flush(self) -> None:
        """Block until all messages are sent."""
        ...


def in_layout(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor in the expected layout, copied if its strides differ, as those of kernels may.

    Raises RunError if it has another shape or dtype.
    """
    shape, stride, dtype = layout
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise RunError(
            f"A message must be a tensor of shape {shape} and {dtype}, but the program sends one of shape "
            f"{tuple(tensor.shape)} and {tensor.dtype}. Undo the edit of the program."
        )
    return in_strides(tensor, stride)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of a dense tensor's elements, in memory order."""
    if tensor.is_contiguous():
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _on_wire(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as process groups require it: contiguous, with a real dtype."""
    flat = in_memory_order(tensor)
    return torch.view_as_real(flat) if flat.is_complex() else flat


@dataclass(eq=False)
class DistributedComm:
    """Communication over torch.distributed: nccl between GPUs, gloo otherwise (also if ranks share a GPU).

    A receive that is posted early must not block a later send, so under nccl every direction between two
    ranks has its own communicator (``channels``: all ordered pairs of ranks that communicate, the same on all
    ranks), and so has each of the ``collectives``.
    """

    device: torch.device
    rank: int
    ranks: int
    channels: tuple[tuple[int, int], ...]
    collectives: int = 0

    def __post_init__(self) -> None:
        self._gloo = dist.get_backend() == "gloo"
        self._wire_device = torch.device("cpu") if self._gloo else self.device
        self._groups: dict[tuple[int, int], Any] = {}
        for pair in self.channels:
            self._groups[pair] = dist.group.WORLD if self._gloo else dist.new_group(list(pair))
        self._joint = [dist.new_group() for _ in range(self.collectives)]
        self._leaving = _Leaving()

    def receive(self, layout: Layout, source: int) -> Pending:
        buffer = self._buffer(layout)
        group = self._groups[source, self.rank]
        # The group's method directly: torch.distributed.irecv repeats checks that always pass here.
        work = group.recv([_on_wire(buffer)], dist.get_group_rank(group, source), 0)
        return Pending([buffer], source, work)

    def _buffer(self, layout: Layout) -> torch.Tensor:
        shape, stride, dtype = layout
        return torch.empty_strided(shape, stride, dtype=dtype, device=self._wire_device)

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = _on_wire(tensor)
        return flat if self._wire_device == self.device else flat.cpu()

    def wait(self, pending: Pending) -> torch.Tensor:
        return self.wait_all(pending)[0]

    def wait_all(self, pending: Pending) -> list[torch.Tensor]:
        with answered():
            pending.work.wait()
        if self._wire_device == self.device:
            return pending.buffers
        return [buffer.to(self.device) for buffer in pending.buffers]

    def broadcast(
        self, tensor: torch.Tensor | None, layout: Layout, source: int, group: int
    ) -> Pending | None:
        buffer = self._buffer(layout) if tensor is None else tensor
        flat = _on_wire(buffer) if tensor is None else self._flat(tensor)
        work = dist.broadcast(flat, source, self._joint[group], async_op=True)
        if tensor is None:
            return Pending([buffer], source, work)
        self._leaving.add(work, flat)
        return None

    def gather(self, tensor: torch.Tensor, layout: Layout, to: int, group: int) -> Pending | None:
        flat = self._flat(tensor)
        buffers = [self._buffer(layout) for _ in range(self.ranks)] if self.rank == to else []
        into = [_on_wire(buffer) for buffer in buffers] or None
        work = dist.gather(flat, into, to, self._joint[group], async_op=True)
        if buffers:
            return Pending(buffers, -1, work)
        self._leaving.add(work, flat)
        return None

    def all_gather(self, tensor: torch.Tensor, layout: Layout, group: int) -> Pending:
        buffers = [self._buffer(layout) for _ in range(self.ranks)]
        into = [_on_wire(buffer) for buffer in buffers]
        work = dist.all_gather(into, self._flat(tensor), self._joint[group], async_op=True)
        return Pending(buffers, -1, work)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        flat = self._flat(tensor)
        group = self._groups[self.rank, to]
        self._leaving.add(group.send([flat], dist.get_group_rank(group, to), 0), flat)

    def broadcast_numbers(self, tensor: torch.Tensor | None, source: int) -> torch.Tensor:
        value = torch.empty(2, dtype=torch.float64) if tensor is None else tensor
        value = value if self._gloo else value.to(self.device)
        with answered():
            dist.broadcast(value, source)
        return value.cpu()

    def flush(self) -> None:
        self._leaving.join()


class _Leaving:
    """Keeps tensors alive until their sends end.  Gloo's sends cannot be polled, so a thread waits for them.

    The thread is woken once ``ENOUGH`` bytes have accumulated, since waking it for every small message would
    cost more than the memory is worth.
    """

    ENOUGH = 1 << 20

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._bytes = 0
        self._error: RuntimeError | None = None
        thread = threading.Thread(target=self._run, name="fxpipe-sends", daemon=True)
        thread.start()

        def stop() -> None:  # a thread inside torch when the interpreter ends would abort the process
            self._queue.put(None)
            thread.join(1.0)

        atexit.register(stop)

    def add(self, work: Any, tensor: torch.Tensor) -> None:
        self._sent.append((work, tensor))
        self._bytes += tensor.nbytes
        if self._bytes >= self.ENOUGH:
            self._hand_over()

    def join(self) -> None:
        self._hand_over()
        done = threading.Event()
        self._queue.put(done)
        done.wait()
        if self._error is not None:
            with answered():
                raise self._error

    def _hand_over(self) -> None:
        self._queue.put(self._sent)
        self._sent, self._bytes = [], 0

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                while item:
                    work, _tensor = item[0]
                    work.wait()
                    del item[0], work, _tensor
            except RuntimeError as error:  # the peer has ended; reported at the end of the step
                self._error = error
