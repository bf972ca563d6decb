"""ZeRO 3 by parts of a stage: four replicas of one rank divide all parameters.

Processes on the CPU over gloo, one thread each.

Part overlap: six layers sleep, 20 ms in each of F, B and W, and so do exchanges between replicas: the gather
of a part's parameters, and the sum of its gradients.  Printed: time of a step / time simulated for the same
order.  Bar: at most 1.03.

Part torch: the GPT-2 of ``vs_torch.py`` with AdamW, 4 microbatches, beside FSDP2 around each block, which
gathers it for each forward and backward.  Printed: the time of a step with its update, and the MiB that a
process holds at most beyond what it held before it built the model.

Part plan: Llama 3 70B on 64 H100s of 8 machines, one rank in 64 replicas, planned on the meta device.

    python benchmarks/divided_parts.py --part overlap --output benchmarks/results/divided_parts_overlap.txt
    python benchmarks/divided_parts.py --part torch --output benchmarks/results/divided_parts_torch.txt
    python benchmarks/divided_parts.py --part plan --output benchmarks/results/divided_parts_plan.txt
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from launch import run
from report import ROOT, Report, median_and_spread
from vs_torch import rotated

import fxpipe

REPLICAS, LAYERS, SLEEP, BAR = 4, 6, 0.020, 1.03
SLEEPING = tuple(
    {"schedule": schedule, "exchange": exchange, "microbatches": 4}
    for schedule in ("1f1b", "gpipe")
    for exchange in (0.010, 0.030)
)
CONTENDERS: tuple[dict[str, Any], ...] = (
    {"contender": "fxpipe", "schedule": "1f1b", "parts": 1, "limit": None},
    {"contender": "fxpipe", "schedule": "1f1b", "parts": 8, "limit": "1GiB"},
    {"contender": "fxpipe", "schedule": "gpipe", "parts": 8, "limit": "1GiB"},
    {"contender": "torch", "schedule": "FSDP2", "reshard": False},
    {"contender": "torch", "schedule": "FSDP2", "reshard": True},
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("overlap", "torch", "plan"), required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each run")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    report = Report(f"ZeRO 3 by parts, part {options.part}")
    if options.part == "plan":
        plans(report)
        report.save(options.output)
        return
    cases = SLEEPING if options.part == "overlap" else CONTENDERS
    results: dict[int, list[Any]] = {k: [] for k in range(len(cases))}
    for order in rotated(range(len(cases)), options.rounds):
        for k in order:
            case = {**cases[k], "part": options.part, "steps": options.steps}
            results[k].append(run("divided_parts_worker.py", REPLICAS, case))
    report.line(f"\n{REPLICAS} replicas of 1 rank; {options.rounds} rounds of {options.steps} steps")
    {"overlap": overlap, "torch": beside_torch}[options.part](report, results)
    report.save(options.output)


def plans(report: Report) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    from plan_70b import llama

    rows = []
    for schedule, microbatches in (("1f1b", 2), ("gpipe", 2), ("gpipe", 8)):
        begun = time.perf_counter()
        with torch.device("meta"):
            model, example = llama()
        pipe = fxpipe.compile(
            model,
            example,
            ranks=1,
            replicas=64,
            microbatches=microbatches,
            schedule=schedule,
            shard="parameters",
            memory_limit="74GiB",
            optimizer_bytes=12,
            grad_dtype=torch.float32,
            recompute="full",
            costs="H100",
            ranks_per_machine=8,
            check=False,
        )
        timeline = pipe.simulate()
        exchanged = sum(end - start for *_, start, end in timeline.exchanges[0])
        held = pipe.plan.held[0].total + timeline.peak_memory[0]
        seconds = time.perf_counter() - begun
        rows.append([
            f"{schedule}, {microbatches} microbatches", str(len(pipe.schedule.placement)),
            f"{timeline.busy[0]:.1f}", f"{exchanged:.1f}", f"{timeline.seconds:.1f}", f"{held / 2**30:.1f}",
            f"{seconds:.0f}",
        ])  # fmt: skip
    columns = ["schedule", "parts", "s of ops", "s of exchanges", "s a step", "GiB", "s to compile"]
    report.table(columns, rows)


def overlap(report: Report, results: dict[int, list[Any]]) -> None:
    rows, worst = [], 0.0
    for k, of in enumerate(SLEEPING):
        simulated = results[k][0]["simulated"]
        ratios = [statistics.median(own["seconds"]) / simulated for own in results[k]]
        worst = max(worst, statistics.median(ratios))
        exchanged = f"{1e3 * of['exchange']:.0f} ms for a gather or sum"
        rows.append([
            f"{of['schedule']}, {exchanged}", f"{1e3 * results[k][0]['work']:.0f}", f"{1e3 * simulated:.0f}",
            median_and_spread(ratios, ".3f"),
        ])  # fmt: skip
    report.table([f"schedule, {LAYERS} parts", "ms of ops", "ms simulated", "step / simulated"], rows)
    verdict = "the bar is met" if worst <= BAR else f"THE BAR OF {BAR} IS MISSED"
    report.line(f"the worst: {worst:.3f}: {verdict}")


def beside_torch(report: Report, results: dict[int, list[Any]]) -> None:
    rows = []
    for k, of in enumerate(CONTENDERS):
        if of["contender"] == "torch":
            name = f"torch FSDP2, reshard_after_forward={of['reshard']}"
        else:
            name = f"fxpipe {of['schedule']}, " + ("whole" if of["parts"] == 1 else f"{of['parts']} parts")
        rows.append([
            name, median_and_spread([statistics.median(own["seconds"]) for own in results[k]], ".2f"),
            f"{statistics.median(max(own['peak']) for own in results[k]):.0f}",
            f"{results[k][0]['loss']:.4f}",
        ])  # fmt: skip
    report.table(["contender", "s a step", "MiB", "loss"], rows)


if __name__ == "__main__":
    main()
