"""Planning Llama 3 70B for 256 devices: the table, the seconds, and the peak memory of the planning process.

python benchmarks/plan_mesh.py --output benchmarks/results/plan_mesh.txt
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

from report import ROOT, Report

COMMAND = (
    "plan --model plan_70b:llama --device H100 --devices 256 --nodes 32 --batch 1024 --memory-limit 80GiB "
    "--grad-dtype float32 --optimizer-bytes 12"
)
CASES = {"nothing recomputed": "", "recompute as the limit asks for": " --recompute auto"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    report, rows = Report("Planning a model of 70 billion parameters for 256 devices"), []
    for name, more in CASES.items():
        before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "fxpipe", *shlex.split(COMMAND + more)],
            cwd=ROOT / "examples",
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
        )
        wall, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        report.line(f"\nfxpipe {COMMAND}{more}\n{done.stdout}")
        peak = after.ru_maxrss * 1024 / 2**30  # of the largest so far
        rows.append([name, f"{wall:.0f}", f"{processor:.0f}", f"{peak:.2f}"])
    report.table(["case", "seconds", "processor", "process, GiB"], rows)
    report.save(options.output)


if __name__ == "__main__":
    main()
