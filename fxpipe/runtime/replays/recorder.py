"""Records what a function starts on a device, to start it again without the function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fxpipe.runtime.program.accelerator import generator


class DeviceGraph:
    """A recorder: a CUDA graph.  Each random op has a generator of its own in it, which takes a new seed for
    a replay.

    random_ops: their number.
    """

    def __init__(self, device: torch.device, random_ops: int) -> None:
        self._device, self._default = device, generator(device)
        self._graph, self._pool, self._stream = (
            torch.cuda.CUDAGraph(),
            torch.cuda.MemPool(),
            torch.cuda.Stream(device),
        )
        self._generators = [self._default.clone_state() for _ in range(random_ops)]
        for each in self._generators:
            self._graph.register_generator_state(each)

    def record(self, run: Callable[[], object]) -> None:
        """Run a function, whose ops may be recorded without being computed."""
        # Other threads may wait for the device: those that watch communicators, and those that write a
        # checkpoint.
        how: dict[str, Any] = {"pool": self._pool.id, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self._graph, stream=self._stream, **how):
            run()

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Let ops in the block take the memory of what is recorded, which is free between replays."""
        # The allocator has the free memory of a pool by stream.
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool, self._device):
            yield
        outside.wait_stream(self._stream)

    def draw(self, number: int, op: Callable[[], object]) -> object:
        """Run the random op of this number, inside of ``record``."""
        before = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self._generators[number])
        try:
            return op()
        finally:
            self._default.graphsafe_set_state(before)

    def replay(self, seeds: Sequence[int]) -> None:
        """Start all of it again, on the same memory.  seeds: of the random ops, by number."""
        for each, seed in zip(self._generators, seeds, strict=True):
            each.manual_seed(seed)
        self._graph.replay()


MakeRecorder = Callable[[torch.device, int], DeviceGraph]
"""device, number of random ops -> a recorder"""


def recorder_of(device: torch.device) -> MakeRecorder | None:
    """The recorder of a device's work; None if it has none."""
    return DeviceGraph if device.type == "cuda" else None
