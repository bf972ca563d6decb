"""A backend of torch.distributed on the CPU that blocks where those of GPUs block, over gloo.

The first operation of a group on a rank returns when its peers have come to theirs, as nccl makes a
communicator there; so does the first collective of each kind, root and size, for which nccl connects anew.  A
send is complete when the other rank has posted its receive.  Until then it has the address of its tensor, and
keeps nothing alive.  gloo itself blocks nowhere, so what hangs only on GPUs hangs with this backend.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ErrorType
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

NAME = "blocking"

#: The message of each group, counted from its first, that is lost, as all behind it: its send and its receive
#: are never over.  The receiver's communicator then reports the error.
LOST: int | None = None

#: Seconds from a post to the send's read of its tensor: until then memory that is free is written over.
LATE = 0.002


class All(dist.Work):
    """Complete when all of ``works`` are.  Keeps ``kept`` until it is waited for."""

    def __init__(self, works: list[Any], kept: object = None) -> None:
        super().__init__()
        self._works, self._kept = works, kept
        self._done = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._done:
            for work in self._works:
                work.wait()
            self._done, self._kept = True, None
        return True

    def is_completed(self) -> bool:
        return self._done  # gloo cannot be asked

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        self.wait()
        future.set_result([])
        return future


def _at(address: int, size: int) -> torch.Tensor:
    """The bytes at an address, which the tensor does not keep."""
    memory = (ctypes.c_char * size).from_address(address) if size else bytearray(1)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory for gloo, whose threads let a tensor go some time after its wait ends."""
    with _disable_current_modes():  # what they see is memory of the device
        return _at(tensor.data_ptr(), tensor.nbytes).view(tensor.dtype).view(tensor.shape)


class _Sent(dist.Work):
    """A send, which reads its tensor's memory when the other rank has posted its receive."""

    def __init__(self) -> None:
        super().__init__()
        self._over = threading.Event()
        self._errors: list[Exception] = []

    def run(self, gloo: Any, address: int, size: int, peer: int) -> None:
        try:
            posted = torch.empty(1, dtype=torch.uint8)
            gloo.recv([posted], peer, 2).wait()
            time.sleep(LATE)
            gloo.send([_at(address, size)], peer, 1).wait()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._errors.append(error)
        self._over.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._over.wait()
        for error in self._errors:
            raise error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()


class _Never(dist.Work):
    """A message that is lost: a host that waits for it waits as for a device that does."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        threading.Event().wait()
        return False

    def is_completed(self) -> bool:
        return False


class Blocking(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("blocking", store), rank, size, timeout)
        self._store, self._own, self._size, self._timeout = store, rank, size, timeout
        self._used: set[str] = set()
        self._messages = 0
        self._error = ErrorType.SUCCESS
        self._alive: list[Any] = []  # gloo gives up what nobody holds
        self._sends = ThreadPoolExecutor(1, "blocking-sends")  # a stream
        self._coalesced: list[dist.Work] | None = None
        self.operations = 0  # on messages

    def getBackendName(self) -> str:
        return NAME

    def _first_use(self, what: str = "messages") -> None:
        """Block until all ranks of the group are here for the first time."""
        if what not in self._used:
            self._used.add(what)
            self._store.set(f"{what}/{self._own}", "")
            self._store.wait([f"{what}/{rank}" for rank in range(self._size)], self._timeout)

    def _get_backend(self, device: torch.device) -> Blocking:
        return self

    def get_error(self) -> ErrorType:
        return self._error

    def _is_lost(self) -> bool:
        """Whether the next message is."""
        self._messages += 1
        return LOST is not None and self._messages > LOST

    def _start_coalescing(self, device: torch.device) -> None:
        assert self._coalesced is None
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced, None
        assert works
        self.operations += 1
        return All(works)

    def _started(self, work: dist.Work) -> dist.Work:
        if self._coalesced is None:
            self.operations += 1
        else:
            self._coalesced.append(work)
        return work

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        self._first_use()
        if self._is_lost():
            return self._started(_Never())
        work, (tensor,) = _Sent(), tensors
        self._sends.submit(work.run, self._gloo, tensor.data_ptr(), tensor.nbytes, peer)
        return self._started(work)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        self._first_use()
        if self._is_lost():
            self._error = ErrorType.COMM_ERROR
            return self._started(_Never())
        posted = torch.frombuffer(bytearray(1), dtype=torch.uint8)  # no memory of the device
        self._alive += [posted, self._gloo.send([posted], peer, 2)]
        return self._started(All([self._gloo.recv(tensors, peer, 1)]))

    def _collective(self, kind: str, root: int, start: Callable[..., Any], *arguments: Any) -> All:
        sizes = [tensor.nbytes for tensor in arguments[-2]]
        self._first_use(f"{kind} {root} {sizes}")
        work = All([start(*tree_map_only(torch.Tensor, _borrowed, arguments))], arguments)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> All:
        return self._collective("broadcast", options.rootRank, self._gloo.broadcast, tensors, options)

    def gather(self, into: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> All:
        return self._collective("gather", options.rootRank, self._gloo.gather, into, tensors, options)

    def all_gather_single(self, into: torch.Tensor, tensor: torch.Tensor, options: Any) -> All:
        with _disable_current_modes():  # what they see is memory of the device
            parts = [[*into.view(self._size, -1)]]
        return self._collective("allgather", -1, self._gloo.allgather, parts, [tensor], AllgatherOptions())

    _allgather_base = all_gather_single  # of torch before 2.13

    def all_to_all_single(self, into: torch.Tensor, tensor: torch.Tensor, *others: Any) -> All:
        self._first_use("alltoall")  # by sends, as a gather: connects all pairs
        return All([self._gloo.alltoall_base(_borrowed(into), _borrowed(tensor), *others)], (into, tensor))

    alltoall_base = all_to_all_single  # of torch before 2.13

    def allgather(self, into: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> All:
        return self._collective("allgather", -1, self._gloo.allgather, into, tensors, options)


def register(device: str = "cpu") -> None:
    def create(options: Any, _: Any) -> Blocking:
        return Blocking(options.store, options.group_rank, options.group_size, options.timeout)

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=[device])
