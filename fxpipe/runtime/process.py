"""This process as one of the ranks that torchrun started: joining, sharing, failing together."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fxpipe.errors import RunError
from fxpipe.runtime.torch_private import default_store

#: Maximum time that a rank waits for another one.
TIMEOUT = timedelta(minutes=10)
FAILURE = "fxpipe/failure"  # the key in the store for the message of a failed rank
#: Seconds between checks for that message, and seconds that a rank then has to raise its own error.
POLL, GRACE = 0.5, 4.0


def under_torchrun() -> bool:
    """Whether this process is one of several ranks: a process group or torchrun's variables exist."""
    return dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1


def default_device() -> torch.device:
    """This process's GPU if there is one (shared where processes outnumber GPUs), else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    return torch.device("cuda", index)


@dataclass(frozen=True)
class Process:
    rank: int
    ranks: int
    timeout: timedelta

    @staticmethod
    def join(ranks: int, device: torch.device, timeout: timedelta = TIMEOUT) -> Process:
        """Join the process group; create it if there is none.

        Raises RunError if the number of processes is not the number of ranks.
        """
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
        if world != ranks:
            raise RunError(
                f"The pipeline has {ranks} ranks and there are {world} processes. "
                f"Start it with torchrun --nproc-per-node {ranks}, or compile with ranks={world}."
            )
        if not dist.is_initialized():
            dist.init_process_group(_backend_for(device), timeout=timeout)
        return Process(dist.get_rank(), ranks, timeout)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Broadcast bytes from rank 0; the other ranks pass None."""
        size = self._on_wire(torch.tensor([len(data or b"")]))
        dist.broadcast(size, 0)
        payload = torch.empty(int(size), dtype=torch.uint8)
        if data:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        payload = self._on_wire(payload)
        dist.broadcast(payload, 0)
        return payload.cpu().numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Gather the bytes of every rank on every rank.  Raises RunError if a rank has ended."""
        size = self._on_wire(torch.tensor([len(data)]))
        sizes = [torch.empty_like(size) for _ in range(self.ranks)]
        try:
            dist.all_gather(sizes, size)
            own = self._on_wire(torch.zeros(max(map(int, sizes)), dtype=torch.uint8))
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            padded = [torch.empty_like(own) for _ in range(self.ranks)]
            dist.all_gather(padded, own)
        except RuntimeError as error:
            raise RunError(f"The other ranks did not answer: {error}") from error
        return [p[: int(n)].cpu().numpy().tobytes() for p, n in zip(padded, sizes, strict=True)]

    def broadcast_(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a tensor with its values on rank ``source``."""
        value = self._on_wire(tensor.contiguous())
        dist.broadcast(value, source)
        if value is not tensor:
            tensor.copy_(value)

    def send_to(self, tensor: torch.Tensor, source: int, target: int) -> None:
        """Overwrite a tensor on rank ``target`` with its values on rank ``source``; both call it."""
        value = self._on_wire(tensor.contiguous())
        if dist.get_backend() == "gloo":  # which sends only what lies on the CPU
            value = value.cpu()
        if self.rank == source:
            dist.send(value, target)
            return
        dist.recv(value, source)
        if value is not tensor:
            tensor.copy_(value)

    def all_reduce_sum(self, value: float) -> float:
        """The sum of one number over all ranks."""
        total = self._on_wire(torch.tensor(value, dtype=torch.float64))
        dist.all_reduce(total)
        return float(total)

    def barrier(self) -> None:
        self.all_reduce_sum(0.0)

    def watch(self) -> None:
        """Start a thread that ends this process soon after another rank has failed.

        A rank whose neighbor has ended raises by itself; a rank that waits for one that still runs would not
        notice the failure.
        """
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(over,), name="fxpipe-watch", daemon=True)
        watcher.start()

        def stop() -> None:  # a thread inside torch when the interpreter ends would abort the process
            over.set()
            watcher.join(GRACE)

        atexit.register(stop)

    def _watch(self, over: threading.Event) -> None:
        store = default_store()
        try:
            while not store.check([FAILURE]):
                if over.wait(POLL):
                    return
            message = store.get(FAILURE).decode()
        except RuntimeError:  # the store has been closed: the run is over
            return
        if over.wait(GRACE):
            return
        print(f"fxpipe: rank {self.rank} ends: {message}", file=sys.stderr, flush=True)
        os._exit(1)

    def leave_failure(self, message: str) -> None:
        """Tell the other ranks why this one fails."""
        default_store().set(FAILURE, message.encode(errors="backslashreplace").decode())

    def find_failure(self) -> str | None:
        """The message of a rank that failed, if there is one."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            if default_store().check([FAILURE]):
                message: bytes = default_store().get(FAILURE)
                return message.decode()
            time.sleep(0.05)
        return None

    @staticmethod
    def _on_wire(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cuda() if dist.get_backend() == "nccl" else tensor


def _backend_for(device: torch.device) -> str:
    """nccl if every process of this machine has its own GPU, else gloo."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "nccl" if device.type == "cuda" and torch.cuda.device_count() >= local else "gloo"
