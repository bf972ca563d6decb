"""Communication between ranks: one protocol, over torch.distributed or inside one process.

Messages from one rank to another arrive in the order in which they were sent.  All ranks take part in the
collectives of a group, in the same order.  Only waits block, for at most the time limit.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch

from fxpipe.errors import RunError
from fxpipe.plan.tensors import in_strides, sum_over_ranks


class NoAnswer(RunError):
    """Another rank did not send or take a message: it has failed, ended, or is late by the time limit."""


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """Turn the error of a process group whose peer is gone or late into NoAnswer.

    An error of this rank's own device, which any call may raise once the device has failed, stays as it is.
    """
    try:
        yield
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:  # of torch, with the reason as text
        # Without the file of torch's source, and its general advice.
        text = re.sub(r"^\[\S+:\d+\] ", "", str(error)).partition(". This is typically")[0]
        raise NoAnswer(text) from error


class Wait(NamedTuple):
    """A wait of a rank.

    ``what``: as text, in which {} stands for the number of the process of rank ``peers``.  ``peers``: a rank
    of its pipeline, all of them, or this rank in all replicas, lanes, or both ("alike"); None if it waits for
    none.
    """

    what: str
    peers: int | Literal["ranks", "replicas", "lanes", "alike"] | None


Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""The shape, strides and dtype of a message, the same for sender and receiver."""


Numbers = Callable[[], torch.Tensor]
"""Waits for numbers, and returns them."""
Collective = Literal["broadcast", "gather", "all_gather", "reduce"]


@dataclass(eq=False)
class Pending:
    """A message being received; ``work`` is the handle of its Comm.

    ``buffers``: the tensors of a message, or one from every rank.  ``source``: the rank that sends, or -1 for
    all.  ``part``: the tensor that this rank has sent itself, which lives until the others have theirs.
    ``adds``: whether their sum is what arrives.
    """

    buffers: list[torch.Tensor]
    source: int
    work: Any = None
    part: torch.Tensor | None = None
    adds: bool = False


def gets_values(verb: Collective, tensor: torch.Tensor | None, root: int, rank: int) -> bool:
    """Whether a rank gets values by a collective."""
    return tensor is None if verb == "broadcast" else root in (-1, rank)


def new_buffer(layout: Layout, device: torch.device) -> torch.Tensor:
    """The memory for a tensor to come."""
    shape, stride, dtype = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def new_buffers(layout: Layout, ranks: int, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The memory, as bytes, for a tensor of every rank, and its parts."""
    shape, stride, dtype = layout
    whole = torch.empty(ranks * math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device)
    return whole, [part.view(dtype).as_strided(shape, stride) for part in whole.view(ranks, -1)]


class Comm(Protocol):
    def start(self) -> None:
        """Begin a step."""
        ...

    def receive(self, layouts: Sequence[Layout], source: int) -> Pending: ...

    def wait(self, pending: Pending) -> list[torch.Tensor]: ...

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None: ...

    def collective(
        self, verb: Collective, tensor: torch.Tensor | None, layout: Layout, root: int, group: int
    ) -> Pending | None:
        """Start an operation of all ranks, of a verb of ``rt``; what to wait for, on a rank that gets values.

        tensor: this rank's; None for a broadcast of another one.  root: -1 of an all-gather.
        """
        ...

    def share_numbers(self, numbers: Numbers | None, source: int) -> Numbers:
        """Start to give all ranks two float64 numbers of rank ``source``, which alone passes them, on the
        CPU: their sums over the replicas.  The function that it returns waits for them."""
        ...

    def flush(self) -> None:
        """Block until all messages are sent."""
        ...


Exchange = Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], object]
"""Fills the first tensor with a part from each rank, and gives each a part of the second; the numbers of
elements of the parts."""


def add_up(
    tensor: torch.Tensor, total: torch.Tensor | None, to: int, rank: int, ranks: int, exchange: Exchange
) -> None:
    """Sum the tensors of all ranks into ``total`` of rank ``to``; the others give none.

    Each rank gets its slice of all tensors, adds them up, and gives the sum to that rank.  So none holds more
    of the others than one tensor, however many they are, and the work is spread over the ranks.
    """
    flat = in_memory_order(tensor).view(-1)
    into = flat.new_empty(0) if total is None else in_memory_order(total).view(-1)
    size = flat.numel()
    sizes = [size * (r + 1) // ranks - size * r // ranks for r in range(ranks)]
    needed = ranks * sizes[rank]
    # The memory of the result serves for the slices, which are summed before it is written.
    slices = into[:needed] if into.numel() >= needed else flat.new_empty(needed)
    exchange(slices, flat, [sizes[rank]] * ranks, sizes)
    added = sum_over_ranks(*slices.view(ranks, sizes[rank]))
    del slices
    gives = [sizes[rank] if r == to else 0 for r in range(ranks)]
    exchange(into, added, [0] * ranks if total is None else sizes, gives)


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


def on_wire(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: no backend has all dtypes."""
    flat = in_memory_order(tensor).view(-1)
    return (torch.view_as_real(flat) if flat.is_complex() else flat).view(-1).view(torch.uint8)
