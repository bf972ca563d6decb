"""How long compiling takes, and how it grows with the depth of the model.

A line a size: a GPT-2 of Hugging Face on the meta device, hidden 256, vocabulary 8192, one microbatch
of one sequence of 128, for 4 ranks and 16 microbatches; seconds in total and in each phase of
``fxpipe.compiler.compile_model``.  Every compilation runs in a fresh process, as a user's does; the
time to import torch, transformers and fxpipe is not counted.

    python benchmarks/compile_time.py --output benchmarks/results/compile_time.txt
    python benchmarks/compile_time.py --layers 24 --schedules zb-h1 --profile build/compile.prof
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from pathlib import Path

from report import Report

LAYERS = (12, 24, 48)
SCHEDULES = ("1f1b", "zb-h1", "auto")
RANKS, MICROBATCHES = 4, 16
#: Seconds that compiling so many layers may take, on 2 cores.
BARS = {12: 15.0, 48: 60.0}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    parser.add_argument("--dropout", type=float, default=0.1, help="GPT-2's own is 0.1")
    parser.add_argument("--rounds", type=int, default=3, help="compilations of each; the median is shown")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    parser.add_argument("--profile", type=Path, help="compile once and keep where the time goes")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once is not None:
        print(json.dumps(compile_once(**json.loads(options.once))))
    elif options.profile is not None:
        profile(options.layers[0], options.schedules[0], options.dropout, options.profile)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    report = Report("Compile time")
    report.line(
        f"\nGPT-2, hidden 256, dropout {options.dropout}, {RANKS} ranks, {MICROBATCHES} microbatches: "
        f"median seconds of {options.rounds}"
    )
    rows, totals = [], {}
    for schedule in options.schedules:
        for layers in options.layers:
            runs = [_in_fresh_process(layers, schedule, options.dropout) for _ in range(options.rounds)]
            medians = {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}
            totals[schedule, layers] = total = medians["total"]
            bar = f"{BARS[layers]:.0f}" if layers in BARS else ""
            cells = [f"{seconds:.2f}" for seconds in medians.values()]
            rows.append([schedule, str(layers), *cells, f"{1000 * total / layers:.0f}", bar])
    report.table(["schedule", "layers", *medians, "ms a layer", "bar"], rows)
    missed = [key for key, total in totals.items() if total > BARS.get(key[1], float("inf"))]
    report.line(f"over the bar: {missed}" if missed else "none is over its bar")
    first, last = min(options.layers), max(options.layers)
    if first < last:
        growth = max(totals[s, last] / totals[s, first] for s in options.schedules)
        report.line(f"{last / first:.1f} times the layers take {growth:.1f} times as long, at most")
    report.save(options.output)


def _in_fresh_process(layers: int, schedule: str, dropout: float) -> dict[str, float]:
    arguments = json.dumps({"layers": layers, "schedule": schedule, "dropout": dropout})
    done = subprocess.run(
        [sys.executable, __file__, "--once", arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def compile_once(layers: int, schedule: str, dropout: float) -> dict[str, float]:
    """Seconds in total and in each phase."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import fxpipe  # noqa: F401 - imported before the clock starts
    from fxpipe.compiler import compile_model, phases
    from fxpipe.options import Options
    from fxpipe.progress import Phases

    config = GPT2Config(
        n_layer=layers,
        n_embd=256,
        n_head=4,
        vocab_size=8192,
        n_positions=256,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).train()
    ids = torch.zeros(1, 128, dtype=torch.long)
    example = {"input_ids": ids, "labels": ids}
    options = Options(
        ranks=RANKS,
        microbatches=MICROBATCHES,
        schedule=schedule,
        stages_per_rank=None,
        placement=None,
        split_points=None,
        memory_limit=None,
        costs="analytic",
        seed=0,
    )
    phase = Phases("", phases(options))
    before = time.perf_counter()
    compile_model(model, example, None, options, torch.device("cpu"), phase)
    return {"total": time.perf_counter() - before, **phase.seconds}


def profile(layers: int, schedule: str, dropout: float, path: Path) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(compile_once, layers, schedule, dropout)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.dump_stats(path)
    pstats.Stats(profiler).sort_stats("cumulative").print_stats("fxpipe/", 30)
    print(f"all functions: python -m pstats {path}")


if __name__ == "__main__":
    main()
