"""Keeps other cores and the memory of this machine as busy as the other ranks of a step do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

ROWS, WIDTH = 16384, 512


@contextlib.contextmanager
def busy_threads(number: int) -> Iterator[list[threading.Thread]]:
    """So many threads that compute on the CPU until the block ends, each with as many threads of its own as
    this one has."""
    over = threading.Event()
    threads = [
        threading.Thread(target=_compute, args=(torch.get_num_threads(), over), daemon=True)
        for _ in range(number)
    ]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _compute(threads: int, over: threading.Event) -> None:
    """The ops of a linear layer: a product, and a function of a result that caches do not hold.

    They hold Python's lock for a few microseconds in many milliseconds.
    """
    torch.set_num_threads(threads)
    weight = torch.full((WIDTH, WIDTH), 1e-3, dtype=torch.float32)
    x = torch.ones(ROWS, WIDTH, dtype=torch.float32)
    while not over.is_set():
        x = torch.tanh(x @ weight)
