"""Random ops with an explicit key, so that the numbers of a run depend on the key alone.

A key is made from (seed, step, microbatch); each op adds its position in the model.  The number of ranks, the
schedule, recomputation and offload do not change the numbers that an op draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_MASK = (1 << 64) - 1


def fold(key: int, number: int) -> int:
    """Mix a number into a key (the finalizer of splitmix64)."""
    z = (key + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def keyed(key: int, position: int, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a random op as if torch's generators had been seeded with ``key`` and ``position``.

    The generators' states are restored.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(fold(key, position) & 0x7FFFFFFFFFFFFFFF)
        return op(*args, **kwargs)
