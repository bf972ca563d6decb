"""The processor time of a first ``compile`` and the size of its programs, in turns with another checkout.

    python benchmarks/compile_beside.py --beside ../old --output benchmarks/results/compile_beside.txt

Each compilation has a process of its own, in which transformers is imported and fxpipe is not: what
``compile`` imports counts, as for a script. Models of 12 layers, 4 ranks, one thread; the median of the
rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from report import ROOT, Report

CASES = {"gpt2": {}, "llama": {}, "gpt2, split vocabulary": {"vocab_parallel": "1-barrier"}}
CODE = """
import json, sys, time, warnings
warnings.filterwarnings("ignore")
import torch, transformers
torch.set_num_threads(1)
name, options = sys.argv[1], json.loads(sys.argv[2])
torch.manual_seed(0)
small = {"vocab_size": 512}
if name.startswith("gpt2"):
    config = transformers.GPT2Config(n_layer=12, n_embd=64, n_head=4, **small)
    model = transformers.GPT2LMHeadModel(config)
else:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=2, **small,
    )
    model = transformers.LlamaForCausalLM(config)
ids = torch.zeros(2, 32, dtype=torch.int64)
import fxpipe
begun = time.process_time()
pipe = fxpipe.compile(
    model.eval(), {"input_ids": ids, "labels": ids}, ranks=4, microbatches=8, schedule="zb-h1", **options
)
seconds = time.process_time() - begun
print(json.dumps([seconds, sum(map(len, pipe.artifact.programs))]))
"""


def compiled(checkout: Path, name: str) -> tuple[float, int]:
    command = [sys.executable, "-c", CODE, name, json.dumps(CASES[name])]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles all sources anew
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd="/")
    seconds, size = json.loads(run.stdout.splitlines()[-1])
    return seconds, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--beside", type=Path, required=True, help="the root of another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    checkouts = {"here": ROOT, "there": arguments.beside.resolve()}
    for checkout in checkouts.values():
        compiled(checkout, "gpt2")  # which writes its bytecode
    rows = []
    for name in CASES:
        taken: dict[str, list[float]] = {side: [] for side in checkouts}
        sizes: dict[str, int] = {}
        for _ in range(arguments.rounds):
            for side, checkout in checkouts.items():
                seconds, sizes[side] = compiled(checkout, name)
                taken[side].append(seconds)
        here, there = (median(taken[side]) for side in checkouts)
        rows.append(
            (
                name,
                f"{here:.2f}",
                f"{there:.2f}",
                f"{here / there:.2f}",
                f"{sizes['here'] / sizes['there']:.3f}",
            )
        )
    report = Report("A first compile, processor seconds, and the bytes of its programs beside those there")
    report.table(("model", "here", "there", "time", "bytes"), rows)
    report.save(arguments.output)


if __name__ == "__main__":
    main()
