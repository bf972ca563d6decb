"""Every private torch symbol that running programs use; those of the compiler are in ``fxpipe.ir.compat``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as no_modes

__all__ = ["StorageWeakRef", "TorchDispatchMode", "default_store", "no_modes", "pytree"]


def default_store() -> Any:
    """The key-value store that torchrun's processes share."""
    return dist.distributed_c10d._get_default_store()
