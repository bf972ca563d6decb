"""Processes that keep the other cores and the memory of this machine as busy as the other ranks of a step."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess


@contextlib.contextmanager
def busy_processes(number: int, threads: int) -> Iterator[list[SpawnProcess]]:
    """So many processes that compute on the CPU, each with so many threads, until the block ends."""
    started = multiprocessing.get_context("spawn")
    ready = [started.Event() for _ in range(number)]
    processes = [started.Process(target=_compute, args=(one, threads), daemon=True) for one in ready]
    try:
        for process in processes:
            process.start()
        for one in ready:
            one.wait()
        yield processes
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
            process.join()


def _compute(ready: object, threads: int) -> None:
    """The ops of a linear layer: a product, and a function of a result that caches do not hold."""
    import torch

    torch.set_num_threads(threads)
    weight, x = torch.randn(512, 512), torch.randn(16384, 512)
    ready.set()  # type: ignore[attr-defined]
    while True:
        x = torch.tanh(x @ weight)
