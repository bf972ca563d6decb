"""Steps of a GPT-2 and a Llama beside those of another checkout: processor seconds of all ranks, peak memory.

All ranks run in one process, in turns, so that the seconds are those of the programs and not of waiting.
Each measurement takes a fresh process, the checkouts by turns; the least seconds of several steps count, and
the median of the ratios of the rounds.

    python benchmarks/step_time.py --beside ../older --output benchmarks/results/step_time.txt
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from report import ROOT, Report, revision

MICROBATCHES, ROWS, SEQUENCE, VOCABULARY = 8, 1, 128, 2048
#: GPT-2 of 4 layers on 2 ranks, where a case says nothing else.
CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-v": {"schedule": "zb-v"},
    "zb-h1, recompute": {"schedule": "zb-h1", "recompute": "full"},
    "zb-h1, vocabulary": {"schedule": "zb-h1", "vocab_parallel": True},
    "zb-h1, offload": {"schedule": "zb-h1", "offload": True},
    "zb-h1, inductor": {"schedule": "zb-h1", "backend": "inductor"},
    "12 layers on 4, zb-h1": {"layers": 12, "ranks": 4, "schedule": "zb-h1"},
    "12 layers on 4, zb-h1, inductor": {"layers": 12, "ranks": 4, "schedule": "zb-h1", "backend": "inductor"},
    "Llama, zb-h1": {"model": "llama", "schedule": "zb-h1"},
    "Llama, zb-h1, inductor": {"model": "llama", "schedule": "zb-h1", "backend": "inductor"},
    "Llama, 12 on 4, zb-h1": {"model": "llama", "layers": 12, "ranks": 4, "schedule": "zb-h1"},
    "Llama, 12 on 4, zb-h1, inductor": {
        "model": "llama", "layers": 12, "ranks": 4, "schedule": "zb-h1", "backend": "inductor",
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, required=True, help="a checkout of another revision")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes of each")
    parser.add_argument("--steps", type=int, default=6, help="steps in each")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once is not None:
        print(json.dumps(measured(options.steps, json.loads(options.once))))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    report = Report("Step time")
    report.line(
        f"\nHidden 256, {MICROBATCHES} microbatches of {ROWS} × {SEQUENCE}; GPT-2 of 4 layers on 2 ranks "
        f"where no other is named: processor seconds of a step of all ranks (least of {options.steps}, "
        f"median of {options.rounds} processes), median of the rounds' ratios; peaks of saved values in MB"
    )
    rows = []
    for name, settings in CASES.items():
        found: dict[Path, list[dict[str, Any]]] = {ROOT: [], options.beside: []}
        for _ in range(options.rounds):
            for root, runs in found.items():
                runs.append(_in_fresh_process(root, options.steps, settings))
        ours, theirs = (statistics.median(run["seconds"] for run in runs) for runs in found.values())
        of_rounds = [a["seconds"] / b["seconds"] for a, b in zip(*found.values(), strict=True)]
        peaks = [" ".join(f"{peak / 1e6:.2f}" for peak in runs[0]["peaks"]) for runs in found.values()]
        losses = [runs[0]["loss"] for runs in found.values()]
        same = "same" if losses[0] == losses[1] else f"{losses[0] - losses[1]:.0e}"
        ratio = statistics.median(of_rounds)
        rows.append([name, f"{ours:.3f}", f"{theirs:.3f}", f"{ratio:.3f}", *peaks, same])
    older = revision(options.beside)
    report.table(["case", "seconds", older, "ratio", "peaks", f"peaks, {older}", "loss"], rows)
    report.save(options.output)


def _in_fresh_process(root: Path, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--beside", str(root), "--steps", str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--once", json.dumps(settings)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import torch

    import fxpipe

    settings = {"model": "gpt2", "layers": 4, "ranks": 2} | settings
    torch.manual_seed(0)
    model = built(settings.pop("model"), settings.pop("layers"))
    data = torch.randint(0, VOCABULARY, (MICROBATCHES * ROWS, SEQUENCE))
    batch = {"input_ids": data, "labels": data}
    example = {name: x[:ROWS] for name, x in batch.items()}
    pipe = fxpipe.compile(model, example, microbatches=MICROBATCHES, **settings)
    first = pipe.run_local(batch, measure_memory=True)
    taken = []
    for _ in range(steps):
        before = time.process_time()
        pipe.run_local(batch)
        taken.append(time.process_time() - before)
    return {"seconds": min(taken), "peaks": first.peak_saved, "loss": float(first.loss)}


def built(kind: str, layers: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    ids = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "llama":
        sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": layers}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(**ids, **sizes, **heads))
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_layer": layers, "n_embd": 256, "n_head": 4, "n_positions": SEQUENCE}
    return GPT2LMHeadModel(GPT2Config(**ids, **sizes, **dropout))


if __name__ == "__main__":
    main()
