"""A backend of torch.distributed on the CPU that blocks where those of GPUs block, over gloo.

The first operation of a group on a rank returns when its peers have come to theirs, as nccl makes a
communicator there.  A send is complete when the other rank has posted its receive.  gloo itself blocks
nowhere, so what hangs only on GPUs hangs with this backend.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NAME = "blocking"


class _Work(dist.Work):
    """Complete when all of ``works`` are."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works
        self._done = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._done:
            for work in self._works:
                work.wait()
            self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done  # gloo cannot be asked

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        self.wait()
        future.set_result([])
        return future


class Blocking(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("blocking", store), rank, size, timeout)
        self._store, self._own, self._size, self._timeout = store, rank, size, timeout
        self._used = False
        self._alive: list[Any] = []  # gloo gives up what nobody holds

    def getBackendName(self) -> str:
        return NAME

    def _first_use(self) -> None:
        """Block until all ranks of the group are here for the first time."""
        if not self._used:
            self._used = True
            self._store.set(f"here/{self._own}", "")
            self._store.wait([f"here/{rank}" for rank in range(self._size)], self._timeout)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> _Work:
        self._first_use()
        posted = [torch.empty(1, dtype=torch.uint8)]
        self._alive.append(posted)
        return _Work([self._gloo.send(tensors, peer, 1), self._gloo.recv(posted, peer, 2)])

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> _Work:
        self._first_use()
        posted = [torch.zeros(1, dtype=torch.uint8)]
        self._alive += [posted, self._gloo.send(posted, peer, 2)]
        return _Work([self._gloo.recv(tensors, peer, 1)])

    def _collective(self, start: Callable[..., Any], *arguments: Any) -> _Work:
        self._first_use()
        return _Work([start(*arguments)])

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> _Work:
        return self._collective(self._gloo.broadcast, tensors, options)

    def gather(self, into: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> _Work:
        return self._collective(self._gloo.gather, into, tensors, options)

    def allgather(self, into: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> _Work:
        return self._collective(self._gloo.allgather, into, tensors, options)


def register() -> None:
    def create(options: Any, _: Any) -> Blocking:
        return Blocking(options.store, options.group_rank, options.group_size, options.timeout)

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
