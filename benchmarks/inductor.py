"""The step of a GPT-2 op by op and with ``backend="inductor"``; beside it torch's own, eager and compiled.

All ranks run in one process, in turns, so that the seconds are those of the programs and not of waiting.
Each measurement takes a fresh process; the least processor seconds of several steps count.  The peak is of
all that a step allocates, also within an op, beyond what is there before it; it is measured where one thread
runs the step.

    python benchmarks/inductor.py --output benchmarks/results/inductor.txt
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Report

RANKS, MICROBATCHES, ROWS, VOCABULARY = 2, 4, 2, 2048
SIZES = {"layers": 4, "hidden": 768, "heads": 12, "sequence": 256}  # of GPT-2 small, whose layers are 12
CASES: dict[str, dict[str, Any]] = {
    "1f1b, one rank": {"schedule": "1f1b", "ranks": 1},
    "1f1b, one rank, recompute norms": {"schedule": "1f1b", "ranks": 1, "recompute": "norms"},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-h1, dropout 0.1": {"schedule": "zb-h1", "dropout": 0.1},
}
TORCH = {"torch": {}, "torch, dropout 0.1": {"dropout": 0.1}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes of each")
    parser.add_argument("--steps", type=int, default=5, help="steps in each")
    parser.add_argument("--only", nargs="*", default=[*CASES, *TORCH], help="some of the cases")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once is not None:
        print(json.dumps(measured(options.steps, options.device, **json.loads(options.once))))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    report = Report('Step time with backend="inductor"')
    report.line(
        f"\nGPT-2 of {SIZES}, vocabulary {VOCABULARY}, float32 on one thread, {RANKS} ranks, {MICROBATCHES} "
        f"microbatches of {ROWS} rows: seconds of a step of all ranks (least of {options.steps}, median of "
        f"{options.rounds} processes); its peak of allocated MB; seconds of the first step, with compilation"
    )
    rows = []
    for name in options.only:
        case = {**CASES, **TORCH}[name]
        found: dict[str, list[dict[str, Any]]] = {"eager": [], "inductor": []}
        for _ in range(options.rounds):
            for backend, runs in found.items():
                own = {**case, "backend": backend, "pipeline": name in CASES}
                runs.append(_in_fresh_process(options, own))
                print(f"{name}, {backend}: {runs[-1]}", file=sys.stderr, flush=True)
        eager, compiled = (statistics.median(run["seconds"] for run in runs) for runs in found.values())
        peaks = ["" if (peak := runs[0]["peak"]) is None else f"{peak / 1e6:.0f}" for runs in found.values()]
        first = found["inductor"][0]["first"]
        losses = [runs[0]["loss"] for runs in found.values()]
        error = abs(losses[1] / losses[0] - 1)
        ratio = f"{compiled / eager:.3f}"
        rows.append([name, f"{eager:.3f}", f"{compiled:.3f}", ratio, *peaks, f"{first:.0f}", f"{error:.0e}"])
    columns = [
        "case",
        "eager",
        "inductor",
        "ratio",
        "peak, eager",
        "inductor",
        "first step",
        "loss differs by",
    ]
    report.table(columns, rows)
    report.save(options.output)


def _in_fresh_process(options: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--steps", str(options.steps), "--device", options.device]
    done = subprocess.run(
        [*command, "--once", json.dumps(case)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(
    steps: int, device: str, backend: str, pipeline: bool, dropout: float = 0.0, **settings: Any
) -> dict[str, Any]:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import fxpipe

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=SIZES["layers"], n_embd=SIZES["hidden"], n_head=SIZES["heads"], vocab_size=VOCABULARY,
        n_positions=SIZES["sequence"], bos_token_id=0, eos_token_id=0, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(device)
    data = torch.randint(0, VOCABULARY, (MICROBATCHES * ROWS, SIZES["sequence"]), device=device)
    batch = {"input_ids": data, "labels": data}
    if pipeline:
        example = {name: x[:ROWS] for name, x in batch.items()}
        options = {"ranks": RANKS, "microbatches": MICROBATCHES, "backend": backend, **settings}
        alone = options["ranks"] == 1
        pipe = fxpipe.compile(model, example, **options)

        def step() -> torch.Tensor:
            loss = pipe.step(batch) if alone else pipe.run_local(batch).loss
            assert loss is not None
            return loss
    else:
        alone = True
        forward: Callable[..., Any] = torch.compile(model) if backend == "inductor" else model

        def step() -> torch.Tensor:
            model.zero_grad(set_to_none=False)
            total = torch.zeros((), device=device)
            for ids in data.split(ROWS):
                loss = forward(input_ids=ids, labels=ids).loss / MICROBATCHES
                loss.backward()
                total += loss.detach()
            return total

    now = time.process_time if device == "cpu" else time.perf_counter
    begun = time.perf_counter()
    loss = float(step())
    first = time.perf_counter() - begun
    taken = []
    for _ in range(steps):
        before = now()
        float(step())
        taken.append(now() - before)
    peak = peak_bytes(step, device) if alone or device != "cpu" else None
    return {"seconds": min(taken), "peak": peak, "first": first, "loss": loss}


def peak_bytes(step: Callable[[], Any], device: str) -> int:
    """The largest number of bytes that a step allocates beyond those that are there before it."""
    import torch

    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as found:
        step()
    events = found.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = live = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


if __name__ == "__main__":
    main()
