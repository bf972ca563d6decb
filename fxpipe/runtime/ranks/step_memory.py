"""The memory of the steps of a device: a pool of its own, which the first step finds settled.

When torch's allocator has no block for a tensor it asks the driver, and when that has no memory the allocator
gives back what is cached.  For both the driver may wait until all that was started on the device is over,
also receives that are posted ahead, whose senders may wait for this rank.  So no step may ask for memory.

A step takes and returns the memory of its tensors in one order, all of it by its end.  If nothing else uses
the pool, and one run asked the driver for nothing, no later one does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache

import torch

from fxpipe.runtime.program.accelerator import device_allocations, memory_pool


class StepMemory:
    """A pool for the tensors of steps.  ``grown``: how often the device was asked for memory for the pool."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, memory_pool(device)
        self.grown = 0

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """The tensors that this thread makes in the block are in the pool."""
        before = device_allocations(self._device)
        try:
            with self._pool():
                yield
        finally:
            self.grown += device_allocations(self._device) - before


#: That of a device, for all programs of the process: they run one after the other.
step_memory = cache(StepMemory)
