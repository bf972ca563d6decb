"""What the workers share: joining, timing steps, memory, handing in what was measured."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Worker:
    """One process of a run.  ``case`` is what ``launch.run`` was given."""

    case: dict[str, Any]
    result: Path
    rank: int
    ranks: int

    @staticmethod
    def join() -> Worker:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return Worker(json.loads(sys.argv[1]), Path(sys.argv[2]), dist.get_rank(), dist.get_world_size())

    def finish(self, measured: Any) -> None:
        """Keep what rank 0 measured, and leave."""
        if self.rank == 0:
            self.result.write_text(json.dumps(measured))
        dist.barrier()
        dist.destroy_process_group()

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def time_steps(
        self, step: Callable[[], float | None], reset: Callable[[], None], warm_up: int, count: int
    ) -> tuple[list[float], float]:
        """Seconds of each of ``count`` steps, from the first rank's start to the last one's end; the loss.

        step: gives the loss, at least on one rank.  reset: what is done between steps, and not timed.
        """
        spans, loss = [], None
        for _ in range(warm_up + count):
            reset()
            dist.barrier()
            start = time.perf_counter()  # CLOCK_MONOTONIC: one clock for all processes of a machine
            loss = step()
            spans.append((start, time.perf_counter()))
        everyone = self.gather(spans[warm_up:])
        seconds = [
            max(end for _, end in of_step) - min(start for start, _ in of_step)
            for of_step in zip(*everyone, strict=True)
        ]
        return seconds, next(x for x in self.gather(loss) if x is not None)


def start_counting_memory() -> float:
    """Forget what this process held at most until now; return the MiB that it holds now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str = "VmHWM") -> float:
    """MiB of this process that were in memory at most (``VmHWM``) or are now (``VmRSS``)."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024
