"""fxpipe beside torch.distributed.pipelining, in one session and taking turns (CPU, gloo, one thread a rank).

Part a: how fast and how big.  A GPT-2 of Hugging Face with 8 layers, hidden 512, sequence 256, vocabulary
8192 (embedding and head not tied, no dropout), microbatches of one sequence, on 2 ranks.  Forward and
backward, no optimizer.  For torch the layers are split evenly by hand, with the embedding on the first
and the head on the last stage; fxpipe compiles the model once, saves it, and the ranks load it.  Printed:
- share of ideal: (time of one eager process, one thread, same microbatches) / 2 / (time of a step);
- peak memory: what a rank holds resident at most, MiB, and how much of that it held before its first step
  (libraries, weights; those that fxpipe loads are mapped from their file and come in with the first step).
Bar: fxpipe's best above torch's best.

Part b: the pipeline itself.  8 ranks whose stages only sleep, 20 ms in each of forward, input gradient and
weight gradient of a stage (with two stages a rank a microbatch takes twice as long).  The op is calibrated
in each process, for both contenders, so that a call takes 20 ms.  Printed: time of a step / time simulated
for the same order of ops, without any cost of communication.  Bar: at most 1.03 for every schedule of fxpipe.

A step lasts from the first rank's start to the last rank's end.  Every round runs every contender once, in
fresh processes, in an order that differs from round to round; shown are the median over the rounds (of the
medians of their steps), and the least and greatest.

    python benchmarks/vs_torch.py --part a --output benchmarks/results/vs_torch_a.txt
    python benchmarks/vs_torch.py --part a --against ../older    # in turns with another checkout
    python benchmarks/vs_torch.py --part b --output benchmarks/results/vs_torch_b.txt
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launch import run
from report import Report, median_and_spread
from rich.progress import track

#: A loss may differ by the order in which numbers were added.
TOLERANCE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("a", "b"), required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each run")
    parser.add_argument("--microbatches", type=int, nargs="+", help="a: 4 8, b: 16 32")
    parser.add_argument("--only", choices=("fxpipe", "torch"), help="leave the other one out")
    parser.add_argument("--against", type=Path, help="a: another checkout of fxpipe")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        contender, microbatches, directory = options.compile
        compile_contender(ContenderA(**json.loads(contender)), int(microbatches), directory)
        return
    report = Report(f"fxpipe and torch.distributed.pipelining, part {options.part}")
    (part_a if options.part == "a" else part_b)(options, report)
    report.save(options.output)


def rotated(items: Sequence[Any], rounds: int) -> Iterator[list[Any]]:
    """The items once a round, each round beginning with another one."""
    for i in range(rounds):
        start = i % len(items)
        yield [*items[start:], *items[:start]]


# ---------------------------------------------------------------- part a: a real model on two ranks

RANKS_A = 2


@dataclass(frozen=True)
class ContenderA:
    """``kind``: eager, fxpipe or torch.  ``placement`` and ``stages_per_rank`` are fxpipe's.  ``root``: of
    another checkout of it."""

    kind: str
    schedule: str = ""
    stages_per_rank: int = 1
    placement: str = "plain"
    vocab_parallel: str = ""
    root: str = ""

    @property
    def name(self) -> str:
        chunks = (
            f", {self.stages_per_rank} stages a rank, {self.placement}" if self.stages_per_rank > 1 else ""
        )
        vocabulary = f", vocabulary {self.vocab_parallel}" if self.vocab_parallel else ""
        older = "older " if self.root else ""
        return f"{older}{self.kind} {self.schedule}{chunks}{vocabulary}".strip()

    @property
    def environment(self) -> dict[str, str]:
        paths = [*([self.root] if self.root else []), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


EAGER = ContenderA("eager")
CONTENDERS_A = (
    EAGER,
    ContenderA("fxpipe", "1f1b"),
    ContenderA("torch", "1F1B"),
    ContenderA("fxpipe", "zb-h1"),
    ContenderA("torch", "InterleavedZeroBubble"),
    ContenderA("fxpipe", "1f1b", 2, "v"),
    ContenderA("torch", "ZBVZeroBubble"),
    ContenderA("fxpipe", "zb-h1", 2, "v"),
    ContenderA("fxpipe", "zb-h1", vocab_parallel="1-barrier"),
    ContenderA("fxpipe", "zb-h1", 2, "v", vocab_parallel="1-barrier"),
    ContenderA("fxpipe", "zb-h1", 2, "v", vocab_parallel="2-barrier"),
    ContenderA("fxpipe", "zb", 2, "v", vocab_parallel="1-barrier"),
)


def part_a(options: argparse.Namespace, report: Report) -> None:
    contenders = [c for c in CONTENDERS_A if c.kind in ("eager", options.only or c.kind)]
    if options.against:
        root = str(options.against.resolve())
        pairs = [[c, replace(c, root=root)] if c.kind == "fxpipe" else [c] for c in contenders]
        contenders = [c for pair in pairs for c in pair]
    with tempfile.TemporaryDirectory() as folder:
        for microbatches in options.microbatches or (4, 8):
            cases = {c: _case(c, microbatches, options.steps, Path(folder)) for c in contenders}
            runs: dict[ContenderA, list[Any]] = defaultdict(list)
            rounds = [c for turn in rotated(contenders, options.rounds) for c in turn]
            for contender in track(rounds, f"m = {microbatches}", transient=True):
                ranks = 1 if contender is EAGER else RANKS_A
                environment = contender.environment
                runs[contender].append(
                    run("gpt2_worker.py", ranks, cases[contender], environment=environment)
                )
            report.line(f"\nm = {microbatches}; {options.rounds} rounds of {options.steps} steps")
            _table_a(report, runs)


def _case(contender: ContenderA, microbatches: int, steps: int, folder: Path) -> dict[str, Any]:
    case = {
        "contender": contender.kind,
        "schedule": contender.schedule,
        "microbatches": microbatches,
        "steps": steps,
    }
    if contender.kind == "fxpipe":
        case["directory"] = str(_compiled(contender, microbatches, folder))
    return case


def _compiled(contender: ContenderA, microbatches: int, folder: Path) -> Path:
    """In a process of its own, which has the contender's fxpipe."""
    directory = folder / f"{contender.name} {microbatches}".replace(" ", "_")
    arguments = [json.dumps(asdict(contender)), str(microbatches), str(directory)]
    subprocess.run(
        [sys.executable, __file__, "--part", "a", "--compile", *arguments],
        env=os.environ | contender.environment | {"TRANSFORMERS_VERBOSITY": "error"},
        check=True,
    )
    return directory


def compile_contender(contender: ContenderA, microbatches: int, directory: str) -> None:
    import gpt2_worker

    import fxpipe

    pipe = fxpipe.compile(
        gpt2_worker.build(),
        gpt2_worker.example(),
        ranks=RANKS_A,
        microbatches=microbatches,
        schedule=contender.schedule,
        stages_per_rank=contender.stages_per_rank,
        placement=contender.placement,
        vocab_parallel=contender.vocab_parallel or False,
    )
    pipe.save(directory)


def _table_a(report: Report, runs: dict[ContenderA, list[Any]]) -> None:
    ideal = statistics.median(statistics.median(r["seconds"]) for r in runs[EAGER]) / RANKS_A
    loss = runs[EAGER][0]["loss"]
    rows, best = [], {}
    for contender, results in runs.items():
        seconds = [statistics.median(r["seconds"]) for r in results]
        shares = [ideal / s for s in seconds]
        wrong = [r["loss"] for r in results if abs(r["loss"] - loss) > TOLERANCE * abs(loss)]
        if wrong:
            raise SystemExit(f"{contender.name} has the loss {wrong[0]}, eager has {loss}")
        if contender is not EAGER:
            share = statistics.median(shares)
        if contender is not EAGER and not contender.root:
            best[contender.kind] = max(best.get(contender.kind, (0.0, "")), (share, contender.name))
        peak, before = (_per_rank([r[field] for r in results]) for field in ("peak", "before"))
        rows.append(
            [
                contender.name,
                median_and_spread([1000 * s for s in seconds], ".0f"),
                "" if contender is EAGER else median_and_spread(shares, ".3f"),
                peak,
                before,
            ]
        )
    report.table(
        ["contender", "ms a step", "share of ideal", "peak MiB, by rank", "of it before the first step"], rows
    )
    report.line(f"all have the loss of eager, {loss:.6f}, to {TOLERANCE:g}")
    if len(best) == 2:
        (ours, our_name), (theirs, their_name) = best["fxpipe"], best["torch"]
        verdict = "the bar is met" if ours > theirs else "THE BAR IS MISSED"
        report.line(f"best: {our_name} {ours:.3f}, {their_name} {theirs:.3f}: {verdict}")


def _per_rank(rounds: list[list[float]]) -> str:
    return " ".join(f"{statistics.median(of_rank):.0f}" for of_rank in zip(*rounds, strict=True))


# ---------------------------------------------------------------- part b: stages that only sleep

RANKS_B = 8
SLEEP = 0.020
BAR_B = 1.03

FXPIPE_B = (
    *({"schedule": s, "stages_per_rank": 1, "placement": "plain"} for s in ("gpipe", "1f1b", "zb-h1")),
    *({"schedule": s, "stages_per_rank": 2, "placement": "plain"} for s in ("gpipe", "1f1b", "zb-h1")),
    *({"schedule": s, "stages_per_rank": 2, "placement": "v"} for s in ("gpipe", "1f1b", "zb-h1")),
)
TORCH_B = (
    {"schedule": "GPipe", "stages_per_rank": 1},
    {"schedule": "1F1B", "stages_per_rank": 1},
    {"schedule": "Interleaved1F1B", "stages_per_rank": 2},
    {"schedule": "InterleavedZeroBubble", "stages_per_rank": 2},
    {"schedule": "ZBVZeroBubble", "stages_per_rank": 2},
)


def part_b(options: argparse.Namespace, report: Report) -> None:
    sizes = options.microbatches or (16, 32)
    cases = {
        kind: [{**case, "microbatches": m} for case in of_kind for m in sizes]
        for kind, of_kind in {"fxpipe": FXPIPE_B, "torch": TORCH_B}.items()
        if kind == (options.only or kind)
    }
    runs: dict[str, list[Any]] = defaultdict(list)
    rounds = [kind for turn in rotated(list(cases), options.rounds) for kind in turn]
    for kind in track(rounds, "rounds", transient=True):
        case = {"contender": kind, "cases": cases[kind], "sleep": SLEEP, "steps": options.steps}
        runs[kind].append(run("sleep_worker.py", RANKS_B, case))
    report.line(
        f"\n{RANKS_B} ranks, {1000 * SLEEP:.0f} ms for each of F, B and W of a stage; "
        f"{options.rounds} rounds of {options.steps} steps"
    )
    over = max(run["overshoot"] for results in runs.values() for run in results)
    report.line(
        f"after calibration an op of {1000 * SLEEP:.0f} ms takes up to {1e6 * over:.0f} µs longer "
        "(median of the worst rank)"
    )
    _table_b(report, cases, runs)


def _table_b(report: Report, cases: dict[str, list[Any]], runs: dict[str, list[Any]]) -> None:
    rows, worst = [], 0.0
    for kind, of_kind in cases.items():
        for i, case in enumerate(of_kind):
            results = [r["cases"][i] for r in runs[kind]]
            simulated = results[0]["simulated"]
            seconds = [statistics.median(r["seconds"]) for r in results]
            ratios = [s / simulated for s in seconds]
            if kind == "fxpipe":
                worst = max(worst, statistics.median(ratios))
            chunks = f", {case['stages_per_rank']} a rank" if case["stages_per_rank"] > 1 else ""
            placed = f", {case['placement']}" if chunks and "placement" in case else ""
            rows.append(
                [
                    f"{kind} {case['schedule']}{chunks}{placed}",
                    str(case["microbatches"]),
                    f"{1000 * simulated:.0f}",
                    median_and_spread([1000 * s for s in seconds], ".0f"),
                    median_and_spread(ratios, ".3f"),
                ]
            )
    report.table(["contender", "m", "ms simulated", "ms a step", "step / simulated"], rows)
    if "fxpipe" in cases:
        verdict = "the bar is met" if worst <= BAR_B else f"THE BAR OF {BAR_B} IS MISSED"
        report.line(f"fxpipe's worst: {worst:.3f}: {verdict}")


if __name__ == "__main__":
    main()
