"""What it costs that the ranks compare their batches in every step, as a share of the step.

A GPT-2 (that of ``vs_torch.py --part a``) runs on 2 ranks.  Measured is the time that the main thread of a
rank spends in the comparison: the digests of the batch and the start of the gathering, before the program,
and the end of the gathering, after it.

    python benchmarks/agreement.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

from gpt2_worker import build, example
from launch import run
from report import Report
from worker import Worker

import fxpipe

RANKS, MICROBATCHES, WARM_UP, STEPS = 2, 8, 2, 20


def measure() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    report = Report("Comparison of the batches in every step (bar: less than 0.5% of the step)")
    rows = []
    for rank, (before, after, step) in enumerate(run(Path(__file__).name, RANKS, {})):
        share = (before + after) / step
        rows.append(
            [f"{rank}", f"{1e6 * before:.0f}", f"{1e6 * after:.0f}", f"{1000 * step:.0f}", f"{share:.3%}"]
        )
    report.table(["rank", "µs before the program", "µs after it", "ms a step", "share"], rows)
    report.save(options.output)


def work() -> None:
    worker = Worker.join()
    pipe = fxpipe.compile(
        build(), example(), ranks=RANKS, microbatches=MICROBATCHES, schedule="1f1b", effort=1.0
    )
    runner = pipe._runner
    begin = runner._begin_comparison
    befores, afters, steps = [], [], []

    def timed_begin(*arguments):
        start = time.perf_counter()
        compare = begin(*arguments)
        befores.append(time.perf_counter() - start)

        def timed_compare() -> None:
            start = time.perf_counter()
            compare()
            afters.append(time.perf_counter() - start)

        return timed_compare

    runner._begin_comparison = timed_begin
    batch = example(MICROBATCHES)
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        pipe.step(batch)
        steps.append(time.perf_counter() - start)
    own = [statistics.median(times[WARM_UP:]) for times in (befores, afters, steps)]
    worker.finish(worker.gather(own))


if __name__ == "__main__":
    if "RANK" in os.environ:
        work()
    else:
        measure()
