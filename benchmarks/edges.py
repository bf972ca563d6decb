"""Steps one behind the other, with a barrier before each update and without one (CPU, gloo, one thread a
process).

Part sleep: 8 ranks whose stages only sleep, ``--sleep`` seconds in each of F, B and W of a stage.  Printed:
seconds a step of many, of the rank that takes longest / the simulated ones, for both validations, side by
side.  Bar: at most 1.02 for "post".

Part gpt2: 2 ranks train the GPT-2 of ``vs_torch.py`` with AdamW, clipping and ``skip_nonfinite``; blocks of
steps with a barrier and without follow each other in one process.  Bar: "post" is no slower in any row.

No gradient is clipped or infinite: an update is never taken back.

    python benchmarks/edges.py --part sleep --output benchmarks/results/edges_sleep.txt
    python benchmarks/edges.py --part gpt2 --output benchmarks/results/edges_gpt2.txt
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from launch import run
from report import Report, median_and_spread
from rich.progress import track

BAR = 1.02
SLEEPING = (("zb-v", 2), ("zb-2p", 1))
GPT2 = (("1f1b", 1), ("zb-h1", 1), ("zb-2p", 1), ("zb-v", 2))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("sleep", "gpt2"), required=True)
    parser.add_argument("--ranks", type=int, help="sleep: 8, gpt2: 2")
    parser.add_argument("--microbatches", type=int, help="sleep: 16, gpt2: 4")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each validation, in blocks")
    parser.add_argument("--blocks", type=int, default=2, help="of steps of each validation")
    parser.add_argument("--sleep", type=float, default=0.020, help="seconds of F, B and W of a stage")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    sleeps = options.part == "sleep"
    ranks = options.ranks or (8 if sleeps else 2)
    microbatches = options.microbatches or (16 if sleeps else 4)
    report = Report(f"fxpipe: steps without a barrier, part {options.part}")
    report.line(
        f"\n{ranks} ranks, {microbatches} microbatches, {options.blocks} blocks of {options.steps} steps each"
        + (f", ops of {1000 * options.sleep:.0f} ms" if sleeps else "")
    )
    rows, worst = [], 0.0
    for schedule, stages in track(SLEEPING if sleeps else GPT2, "schedules", transient=True):
        case = {"schedule": schedule, "stages_per_rank": stages, "microbatches": microbatches}
        case |= {
            "part": options.part,
            "steps": options.steps,
            "blocks": options.blocks,
            "sleep": options.sleep,
        }
        found = run("edges_worker.py", ranks, case)
        for validation in ("barrier", "post"):
            own = found[validation]
            ratios = [seconds / own["simulated"] for seconds in own["seconds"]]
            against = [a / b for a, b in zip(own["seconds"], found["barrier"]["seconds"], strict=True)]
            if validation == "post":
                worst = max(worst, statistics.median(ratios if sleeps else against))
            rows.append(
                [
                    f"{schedule}, {validation}",
                    f"{1000 * own['simulated']:.0f}",
                    median_and_spread([1000 * x for x in own["seconds"]], ".0f"),
                    median_and_spread(ratios, ".3f"),
                    median_and_spread(against, ".3f"),
                    f"{found['makespan'] * 1000:.0f}",
                ]
            )
    columns = [
        "schedule",
        "simulated ms a step",
        "measured ms",
        "of simulated",
        "of barrier",
        "simulated makespan",
    ]
    report.table(columns, rows)
    bar = BAR if sleeps else 1.0
    what = "of the simulated time" if sleeps else "of the time with a barrier"
    report.line(
        f"\npost takes at most {worst:.3f} {what} (bar {bar:.2f}): {'ok' if worst <= bar else 'missed'}"
    )
    report.save(options.output)


if __name__ == "__main__":
    main()
