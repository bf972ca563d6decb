"""The offload store: saved activations in pinned memory beside a GPU, or in a file, between F and B or W.

Copies in both directions run at once and in the background: the program blocks only in its waits, for at most
the time limit.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch

from fxpipe.errors import RunError
from fxpipe.plan.step import Tier
from fxpipe.runtime.program.accelerator import current_stream, is_accelerator, pinned_memory, stream
from fxpipe.runtime.program.comm import on_wire

#: Maximum time of a wait for the disk, by default.
TIMEOUT = timedelta(minutes=10)
ALIGNMENT = 512  # of the tensors in a pool, in bytes


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def default_tier(device: torch.device) -> Tier:
    return "host" if is_accelerator(device) else "disk"


def check_tier(tier: Tier, device: torch.device, directory: Path | None) -> None:
    """Raise RunError if activations on this device cannot be offloaded to this tier.

    directory: of the disk tier; by default the system's directory for temporary files.
    """
    if (tier == "host") != is_accelerator(device):
        raise RunError(
            f"Activations on {device.type} cannot be offloaded to the tier {tier!r}: use 'host' with a GPU, "
            "'disk' with the CPU."
        )
    directory = directory or Path(tempfile.gettempdir())
    if tier == "disk" and not (directory.is_dir() and os.access(directory, os.W_OK)):
        raise RunError(
            f"Activations cannot be offloaded to {directory}: it is not a writable directory. "
            "Name another one."
        )


def open_store(
    tier: Tier, size: int, directory: Path | None, device: torch.device, timeout: timedelta = TIMEOUT
) -> Store:
    """Open a pool of ``size`` bytes.  Raises RunError as ``check_tier`` does.

    timeout: of a wait for the disk.
    """
    check_tier(tier, device, directory)
    if tier == "host":
        return Host(size, device)
    directory = directory or Path(tempfile.gettempdir())
    if filesystem(directory) in ("tmpfs", "ramfs"):
        warnings.warn(
            f"{directory} is in memory itself, so offloading to it frees no memory. Name a directory on a "
            "disk as Offload.directory.",
            stacklevel=2,
        )
    return Disk(directory, size, timeout)


def filesystem(directory: Path) -> str:
    """The type of a directory's file system, by its Linux name; "" if unknown."""
    best, table = (0, ""), Path("/proc/mounts")
    for line in table.read_text().splitlines() if table.exists() else ():
        _, point, kind, *_ = line.split()
        if directory.resolve().is_relative_to(point):
            best = max(best, (len(point), kind))
    return best[1]


class Store(Protocol):
    """A pool of bytes outside a device's memory.  Tensors are flat, contiguous and of bytes."""

    def write(self, tensor: torch.Tensor, at: int) -> object:
        """Start to copy a tensor out; return a handle to wait for."""
        ...

    def read(self, tensor: torch.Tensor, at: int, written: Any) -> object:
        """Start to copy a tensor back, once its copy out has ended; return a handle to wait for."""
        ...

    def wait(self, ticket: Any) -> None:
        """Block until the copy is visible to later ops."""
        ...


@dataclass(eq=False)
class _Item:
    """The handle of one offloaded tensor; ``tensor`` is None from the end of the offload to the reload."""

    tensor: torch.Tensor | None
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    at: int
    ticket: object


class Offloader:
    """Moves one rank's tensors to its pool and back, in place in lists of tensors or their handles."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self.store, self._device = store, device

    def offload(self, values: list[Any], at: int) -> None:
        for k, tensor in enumerate(values):
            flat = on_wire(tensor)
            ticket = self.store.write(flat, at)
            values[k] = _Item(tensor, tensor.shape, tensor.stride(), tensor.dtype, at, ticket)
            at += aligned(flat.numel())

    def wait_offload(self, values: list[Any]) -> None:
        for item in values:
            self.store.wait(item.ticket)
            item.tensor = None

    def reload(self, values: list[Any]) -> None:
        for item in values:
            tensor = torch.empty_strided(item.shape, item.stride, dtype=item.dtype, device=self._device)
            item.tensor = tensor
            item.ticket = self.store.read(on_wire(tensor), item.at, item.ticket)

    def wait_reload(self, values: list[Any]) -> None:
        for k, item in enumerate(values):
            self.store.wait(item.ticket)
            values[k] = item.tensor


class Disk:
    """A pool in an unnamed file, which disappears with the process, however that ends.

    Its disk space is allocated at once.  The file is read and written, not mapped: an unreadable page of a
    mapped file would end the process without a message, and mapped pages count as resident memory.
    """

    def __init__(self, directory: Path, size: int, timeout: timedelta) -> None:
        self._directory, self._timeout = directory, timeout.total_seconds()
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - as long as self
            os.posix_fallocate(self._file.fileno(), 0, max(size, 1))
        except OSError as error:
            raise RunError(
                f"A file of {size} bytes for activations cannot be made in {directory}: {error}. Free disk "
                "space, or name another directory."
            ) from error
        # One thread each: copies of a direction end in their order, and those of the other one do not wait.
        self._out, self._in = (ThreadPoolExecutor(1, f"fxpipe-{way}") for way in ("offload", "reload"))

    def write(self, tensor: torch.Tensor, at: int) -> Future[None]:
        return self._out.submit(self._write, [tensor], at)

    def read(self, tensor: torch.Tensor, at: int, written: Future[None]) -> Future[None]:
        return self._in.submit(self._read, [tensor], at, written)

    def wait(self, ticket: Future[None]) -> None:
        try:
            ticket.result(self._timeout)
        except TimeoutError as error:
            raise RunError(
                f"An activation could not be moved to or from {self._directory} in {self._timeout:g} s: the "
                "disk is too slow, or does not answer."
            ) from error
        except OSError as error:
            raise RunError(f"Activations could not be moved to or from {self._directory}: {error}") from error

    # The tensor is passed in a list that is emptied, so that no reference is left when the future is done.

    def _write(self, handed: list[torch.Tensor], at: int) -> None:
        data = memoryview(handed.pop().numpy())  # type: ignore[arg-type]
        done = 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done:], at + done)

    def _read(self, handed: list[torch.Tensor], at: int, written: Future[None]) -> None:
        data = memoryview(handed.pop().numpy())  # type: ignore[arg-type]
        written.result(self._timeout)
        done = 0
        while done < len(data):
            moved = os.preadv(self._file.fileno(), [data[done:]], at + done)
            if not moved:
                raise OSError(f"its file ends {len(data) - done} bytes early")
            done += moved


class Host:
    """A pool in pinned memory, with a stream for each direction.

    A tensor is kept alive until the compute stream waits for its copy, so the allocator never reuses its
    memory while the copy runs.  The host never waits.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._pool = pinned_memory(max(size, 1))
        self._device = device
        self._out, self._in = (stream(device) for _ in range(2))

    def write(self, tensor: torch.Tensor, at: int) -> torch.Event:
        return self._copy(self._out, self._place(tensor, at), tensor)

    def read(self, tensor: torch.Tensor, at: int, written: torch.Event) -> torch.Event:
        self._in.wait_event(written)  # of the other stream, which runs beside this one
        return self._copy(self._in, tensor, self._place(tensor, at))

    def wait(self, ticket: torch.Event) -> None:
        current_stream(self._device).wait_event(ticket)

    def _place(self, tensor: torch.Tensor, at: int) -> torch.Tensor:
        return self._pool[at : at + tensor.numel()]

    def _copy(self, side: torch.Stream, target: torch.Tensor, source: torch.Tensor) -> torch.Event:
        # The stream that computed the source, or last used the target's memory.  It must be queried before
        # the side stream is entered, which would then be the current one.
        ready = current_stream(self._device).record_event()
        with side:
            side.wait_event(ready)
            target.copy_(source, non_blocking=True)
            done: torch.Event = side.record_event()
            return done
