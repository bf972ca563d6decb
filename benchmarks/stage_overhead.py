"""What a section costs beside its ops: the call, its arguments, and the handling of its messages.

The same chain of small layers is cut into one, two, four and eight stages a rank. The ops stay, so that the
slope of a step's processor time over the number of sections is the overhead of one, ``Device.stage_overhead``
(``fxpipe/cost/devices/device.py``). On one rank there are no messages; on two, every stage sends to the other
rank.

    python benchmarks/stage_overhead.py
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from launch import run
from report import Report
from torch import nn
from worker import Worker

import fxpipe

STAGES, RANKS, MICROBATCHES, DEPTH, WIDTH = (1, 2, 4, 8), (1, 2), 64, 32, 8
WARM_UP, STEPS = 3, 20


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def measure() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    report = Report("Overhead of a section")
    rows = []
    for ranks in RANKS:
        seconds = [run(Path(__file__).name, ranks, {"stages": stages}) for stages in STAGES]
        sections = [3 * stages * MICROBATCHES for stages in STAGES]
        slope = float(np.polyfit(sections, seconds, 1)[0])
        steps = [f"{1000 * taken:.1f}" for taken in seconds]
        rows.append([f"{ranks}", *steps, f"{1e6 * slope:.0f}"])
    columns = [f"ms a step, {stages} stages a rank" for stages in STAGES]
    report.table(["ranks", *columns, "µs a section"], rows)
    report.save(options.output)


def work() -> None:
    worker = Worker.join()
    torch.manual_seed(0)
    stages = worker.case["stages"]
    pipe = fxpipe.compile(
        Chain(),
        {"x": torch.ones(1, WIDTH)},
        ranks=worker.ranks,
        microbatches=MICROBATCHES,
        schedule="zb-h1",
        stages_per_rank=stages,
        placement="plain",
    )
    batch = {"x": torch.randn(MICROBATCHES, WIDTH)}

    seconds = []
    for _ in range(WARM_UP + STEPS):
        before = time.thread_time()
        pipe.step(batch)
        seconds.append(time.thread_time() - before)
    # The fastest step: other work on the machine slows the others down.
    worker.finish(min(seconds[WARM_UP:]))


if __name__ == "__main__":
    work() if "RANK" in os.environ else measure()
