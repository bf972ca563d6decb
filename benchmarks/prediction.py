"""Prediction against measurement: step time, seconds of ops and memory of pipelines on 2 ranks.

    python benchmarks/prediction.py --output benchmarks/results/prediction.txt

In each round ``fxpipe calibrate`` runs under torchrun, and then each model is compiled with the calibrated
device and with costs="measured", and its steps are timed.

step         a step between two barriers; of all rounds the median, and the least
calibrated   the simulated step from the calibration, by the measured one (bar: within 15%)
sections     the same with costs="measured" (bar: 5%)
ops          the same with the seconds that the ranks' threads took for each op in other steps of that run
F, B, W, BW  of all stages: predicted seconds by those that the ranks' threads took
memory       of each rank: simulated peak of saved bytes by that measured (bar: 5%)

Where other programs take cores, ranks wait for each other longer than any plan says, and the step's columns
tell little; those of ops are free of it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from launch import run
from prediction_models import MODELS
from report import Report

import fxpipe
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.simulation.simulator import simulate

RANKS, MICROBATCHES = 2, 8
SCHEDULES = {"train_hf": "1f1b"}
PHASES = {"F": ("forward",), "B": ("backward",), "W": ("weight",), "BW": ("backward", "weight")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=[*MODELS], metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("Prediction against measurement, 2 ranks, 8 microbatches")
    with tempfile.TemporaryDirectory() as folder:
        rounds = []
        for number in range(options.rounds):
            device = calibrate(Path(folder) / f"cpu{number}.json")
            found = {
                name: measured(name, device, options.steps, Path(folder) / f"{name}{number}")
                for name in options.models
            }
            rounds.append(found)
            print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    show(report, {name: [each[name] for each in rounds] for name in options.models})
    report.save(options.output)


def calibrate(path: Path) -> Path:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    subprocess.run([*command, "-m", "fxpipe", "calibrate", str(path)], check=True, stdout=subprocess.DEVNULL)
    return path


def measured(name: str, device: Path, steps: int, directory: Path) -> dict[str, Any]:
    """One round of a model."""
    found: dict[str, Any] = {}
    for costs in ("measured", str(device)):
        torch.manual_seed(0)
        model, example = MODELS[name]()
        pipe = fxpipe.compile(
            model,
            example,
            ranks=RANKS,
            microbatches=MICROBATCHES,
            schedule=SCHEDULES.get(name, "zb-h1"),
            costs=costs,
            check=False,
        )
        found["sections" if costs == "measured" else "calibrated"] = pipe
    pipe.save(directory)
    batch = {key: torch.cat([x] * MICROBATCHES) for key, x in example.items()}
    peaks = pipe.run_local(batch, measure_memory=True).peak_saved
    case = {"model": name, "directory": str(directory), "microbatches": MICROBATCHES, "steps": 2 * steps}
    return found | run("prediction_worker.py", RANKS, case) | {"peaks": peaks}


def with_ops(costs: Costs, ops: Mapping[str, float]) -> Costs:
    """The costs with measured seconds of ops; those of a BW are divided as planned."""
    stages = list(costs.stages)
    for name, seconds in ops.items():
        kind, stage = name.split()
        own = stages[int(stage)]
        planned = sum(getattr(own, phase) for phase in PHASES[kind])
        times = {phase: getattr(own, phase) * seconds / planned for phase in PHASES[kind]}
        stages[int(stage)] = replace(own, **times)
    return replace(costs, stages=tuple(stages))


def by_kind(costs: Costs, ops: Mapping[str, float]) -> dict[str, float]:
    """Per kind of op: planned by measured seconds, of all stages."""
    planned, taken = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, seconds in ops.items():
        kind, stage = name.split()
        planned[kind] += sum(getattr(costs.stages[int(stage)], phase) for phase in PHASES[kind])
        taken[kind] += seconds
    return {kind: planned[kind] / taken[kind] for kind in planned}


def show(report: Report, found: Mapping[str, list[dict[str, Any]]]) -> None:
    """Medians over the rounds."""
    columns = ["model", "step", "least", "calibrated", "by least", "sections", "by least", "ops", "memory"]
    rows, kinds = [], []
    for name, rounds in found.items():
        steps = [seconds for each in rounds for seconds in each["steps"]]
        step, least = median(steps), min(steps)
        ways = {
            way: median(each[way].simulate().seconds for each in rounds) for way in ("calibrated", "sections")
        }
        pipe = rounds[-1]["calibrated"]
        ops = {key: median(each["ops"][key] for each in rounds) for key in rounds[0]["ops"]}
        from_ops = simulate(pipe.schedule, with_ops(pipe.plan.costs, ops)).seconds
        memory = [a / b for a, b in zip(pipe.simulate().peak_memory, rounds[-1]["peaks"], strict=True)]
        ratios = [f"{ways[way] / by:.2f}" for way in ways for by in (step, least)]
        last = [f"{from_ops / step:.2f}", " ".join(f"{ratio:.3f}" for ratio in memory)]
        rows.append([name, f"{step * 1e3:.1f} ms", f"{least * 1e3:.1f} ms", *ratios, *last])
        for way in ways:
            of_kinds = [by_kind(each[way].plan.costs, each["ops"]) for each in rounds]
            cells = [
                f"{median(each[kind] for each in of_kinds):.2f}" if kind in of_kinds[0] else ""
                for kind in PHASES
            ]
            whole = median(total(each[way].plan.costs, each["ops"]) for each in rounds)
            kinds.append([f"{name}, {way}", *cells, f"{whole:.2f}"])
    report.line("\nSteps and memory: predicted by measured")
    report.table(columns, rows)
    report.line("\nOps: predicted by the seconds of the ranks' threads")
    report.table(["model", *PHASES, "all"], kinds)


def total(costs: Costs, ops: Mapping[str, float]) -> float:
    """Of all ops of a microbatch: planned by measured seconds."""
    return sum(stage.total for stage in costs.stages) / sum(ops.values())


if __name__ == "__main__":
    main()
