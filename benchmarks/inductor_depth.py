"""Compilation by Inductor as a stage has more layers, beside that of another checkout.

GPT-2 with dropout on one rank.  Each measurement takes a fresh process with an empty cache of Inductor's, and
then another one with the cache that the first left, the checkouts by turns.  The seconds are the processor's,
those of the C++ compiler with them.

    python benchmarks/inductor_depth.py --beside ../older --output benchmarks/results/inductor_depth.txt
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from inductor import peak_bytes
from report import ROOT, Report, revision

MICROBATCHES, ROWS, SEQUENCE, HIDDEN, VOCABULARY = 4, 2, 64, 128, 512
COLUMNS = {
    "lines": "{:.0f}",
    "functions": "{:.0f}",
    "compiled": "{:.0f}",
    "first": "{:.1f}",
    "again": "{:.1f}",
    "anew": "{:.0f}",
    "step": "{:.3f}",
    "peak": "{:.1f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, required=True, help="a checkout of another revision")
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 8, 12, 48])
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes of each")
    parser.add_argument("--steps", type=int, default=6, help="steps in each")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    parser.add_argument("--once", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once is not None:
        print(json.dumps(measured(options.once, options.steps)))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    report = Report("Compilation by Inductor, by the layers of a stage")
    report.line(
        f"\nGPT-2, hidden {HIDDEN}, dropout 0.1, float32 on one thread, 1f1b, {MICROBATCHES} microbatches of "
        f"{ROWS} × {SEQUENCE}: lines of the program; functions under @inductor, and how many Inductor "
        "compiled; processor seconds of the first step with an empty cache, with the cache of an earlier "
        f"process, how many functions this process compiled, and seconds of a later step (least of "
        f"{options.steps}); MB that this allocates (median of "
        f"{options.rounds} processes)"
    )
    rows = []
    for layers in options.layers:
        found: dict[Path, list[dict[str, Any]]] = {ROOT: [], options.beside: []}
        for _ in range(options.rounds):
            for root, runs in found.items():
                runs.append(_in_fresh_processes(root, layers, options.steps))
        ours, theirs = (
            {name: statistics.median(run[name] for run in runs) for name in COLUMNS}
            for runs in found.values()
        )
        for name, values in ((f"{layers} layers", ours), (f"  {revision(options.beside)}", theirs)):
            rows.append([name, *(text.format(values[key]) for key, text in COLUMNS.items())])
        rows.append(["  ratio", *(f"{ours[key] / theirs[key]:.3f}" for key in COLUMNS)])
    report.table(["", *COLUMNS], rows)
    report.save(options.output)


def _in_fresh_processes(root: Path, layers: int, steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--beside", str(root), "--steps", str(steps), "--once", str(layers)]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as cache:
        environment["TORCHINDUCTOR_CACHE_DIR"] = cache
        first, again = (
            json.loads(
                subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                .stdout.splitlines()[-1]
            )
            for _ in range(2)
        )  # fmt: skip
    return {**first, "again": again["first"], "anew": again["compiled"]}


def measured(layers: int, steps: int) -> dict[str, Any]:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import torch
    from torch._dynamo.utils import counters
    from transformers import GPT2Config, GPT2LMHeadModel

    import fxpipe

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=HIDDEN, n_head=4, vocab_size=VOCABULARY, n_positions=SEQUENCE, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
    )  # fmt: skip
    data = torch.randint(0, VOCABULARY, (MICROBATCHES * ROWS, SEQUENCE))
    batch = {"input_ids": data, "labels": data}
    example = {name: x[:ROWS] for name, x in batch.items()}
    pipe = fxpipe.compile(
        GPT2LMHeadModel(config),
        example,
        ranks=1,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        backend="inductor",
    )

    before = os.times()
    pipe.step(batch)
    first = sum(os.times()[:4]) - sum(before[:4])
    taken = []
    for _ in range(steps):
        begun = time.process_time()
        pipe.step(batch)
        taken.append(time.process_time() - begun)
    (program,) = pipe.artifact.programs
    return {
        "lines": program.count("\n"),
        "functions": program.count("@inductor\n"),
        "compiled": sum(counters["inductor"][f"fxgraph_cache_{how}"] for how in ("miss", "bypass")),
        "first": first,
        "step": min(taken),
        "peak": peak_bytes(lambda: pipe.step(batch), "cpu") / 1e6,
    }


if __name__ == "__main__":
    main()
