"""Every private torch symbol that running programs use; those of the compiler are in ``fxpipe.ir.compat``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as no_modes

__all__ = [
    "PrefixStore",
    "StorageWeakRef",
    "Store",
    "TorchDispatchMode",
    "as_one",
    "communicator_error",
    "default_store",
    "no_modes",
    "pytree",
    "rendezvous",
]


def default_store() -> Any:
    """The key-value store that torchrun's processes share."""
    return dist.distributed_c10d._get_default_store()


def as_one(group: dist.ProcessGroup, device: torch.device, start: Callable[[], object]) -> dist.Work:
    """The operations that ``start`` begins on a group, as one."""
    group._start_coalescing(device)
    start()
    return group._end_coalescing(device)


def communicator_error(group: dist.ProcessGroup, device: torch.device) -> Callable[[], str] | None:
    """A function that gives the error of a group's communicator: "", "TIMEOUT", "COMM_ERROR", "REMOTE_ERROR".

    None where the backend has no such function, as gloo, whose errors come out of waits.
    """
    get = getattr(group._get_backend(device), "get_error", None)
    return None if get is None else lambda: "" if get().name == "SUCCESS" else get().name
