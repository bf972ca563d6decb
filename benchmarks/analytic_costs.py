"""Analytic times of sections beside measured ones, which files have: predicted ÷ measured.

A file has the measured sections of models, each with its schedule, backend and rules; the models are built on
the meta device, so a GPU is needed only to measure.

    python benchmarks/analytic_costs.py [--output FILE] [FILE.json ...]   by default those of results/
    python benchmarks/analytic_costs.py --measure FILE.json     on a GPU: writes such a file before
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import ROOT, Report
from torch import nn

import fxpipe
from fxpipe.schedule.costs import StageCost

PHASES = {"F": "forward", "B": "backward", "W": "weight"}
Case = dict[str, Any]
"""``model``, ``schedule``, ``ranks``, ``backend``, ``without``; ``seen``: when the constants were set.
Its measured seconds: ``stages``, of each F, B and W (null where unknown), or ``sum``, of all sections for a
microbatch.  ``saved``: the bytes that each stage keeps; a stage that keeps others was cut otherwise.
"""


def gpt2(layers: int, hidden: int, heads: int, sequence: int, words: int, rows: int, **more: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=words, n_positions=sequence,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
                        bos_token_id=0, eos_token_id=0, **more)  # fmt: skip
    return GPT2LMHeadModel(config).bfloat16(), (rows, sequence)


def llama(layers: int, hidden: int, inner: int, heads: int, groups: int, sequence: int, words: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner,
                         num_attention_heads=heads, num_key_value_heads=groups, vocab_size=words,
                         use_cache=False, max_position_embeddings=8192)  # fmt: skip
    return LlamaForCausalLM(config).bfloat16(), (1, sequence)


MODELS: dict[str, Callable[[], Any]] = {
    "GPT-2 6.2B": lambda: gpt2(30, 4096, 32, 1024, 50304, 3, tie_word_embeddings=False),
    "GPT-2 4B-256k": lambda: gpt2(32, 3072, 24, 2048, 256000, 1, tie_word_embeddings=False),
    "GPT-2 1.5B": lambda: gpt2(22, 2304, 24, 1024, 50304, 6, tie_word_embeddings=False),
    "GPT-2 124M": lambda: gpt2(12, 768, 12, 1024, 50304, 4),
    "Llama 12 x 2048": lambda: llama(12, 2048, 8192, 16, 16, 2048, 32000),
    "Llama 6 x 4096": lambda: llama(6, 4096, 14336, 32, 8, 4096, 128256),
}
MEASURED = ("GPT-2 124M", "Llama 12 x 2048", "Llama 6 x 4096")


def compiled(case: Case, device: str, costs: str) -> tuple[StageCost, ...]:
    with torch.device(device):
        model, shape = MODELS[case["model"]]()
        ids = torch.zeros(shape, dtype=torch.long)
    assert isinstance(model, nn.Module)
    pipe = fxpipe.compile(
        model, {"input_ids": ids, "labels": ids}, ranks=case["ranks"], schedule=case["schedule"], costs=costs,
        backend=case["backend"], without=case["without"], microbatches=24, effort=0.1, check=False,
    )  # fmt: skip
    return pipe.plan.costs.stages


def measured(path: Path) -> None:
    """Write the measured sections of some models on the GPU at hand, for both backends."""
    cases: list[Case] = []
    for model in MEASURED:
        for backend in ("eager", "inductor"):
            case: Case = {"model": model, "schedule": "zb-h1", "ranks": 2 if "GPT" in model else 4}
            case |= {"backend": backend, "without": [], "seen": False}
            stages = compiled(case, "cuda", "measured")
            case["stages"] = [[getattr(stage, name) for name in PHASES.values()] for stage in stages]
            case["saved"] = [stage.saved_activations for stage in stages]
            cases.append(case)
            print(model, backend, case["stages"], flush=True)
    card = torch.cuda.get_device_name()
    path.write_text(
        json.dumps({"device": card, "note": f"torch {torch.__version__}", "cases": cases}, indent=1)
    )


def device_of(card: str) -> str:
    """The name of the known device that reports itself so."""
    from fxpipe.cost.devices.known_devices import data_sheets

    return next(s.name for s in data_sheets() if s.is_reported_as(card, s.memory_size))


def rows_of(case: Case, device: str) -> list[list[str]]:
    """Rows of a table: of each phase the median of predicted ÷ measured, and its least and largest."""
    stages = compiled(case, "meta", device)
    name = f"{case['model']}, {case['schedule']}, {case['backend']}{' (seen)' if case['seen'] else ''}"
    if "sum" in case:
        predicted = sum(stage.forward + stage.backward + stage.weight for stage in stages)
        figures = [f"{1e3 * predicted:.1f}", f"{1e3 * case['sum']:.1f}", f"{predicted / case['sum']:.2f}"]
        return [[f"{name}, all sections of a microbatch", *figures, ""]]
    rows, kept = [], case.get("saved") or [stage.saved_activations for stage in stages]
    for number, (phase, field) in enumerate(PHASES.items()):
        pairs = [
            (getattr(stage, field), times[number])
            for stage, times, saved in zip(stages, case["stages"], kept, strict=True)
            if times is not None and times[number] and abs(stage.saved_activations - saved) <= 0.02 * saved
        ]
        ratios = sorted(a / b for a, b in pairs)
        figures = [f"{1e3 * statistics.median(column):.2f}" for column in zip(*pairs, strict=True)]
        figures += [f"{statistics.median(ratios):.2f}", f"{ratios[0]:.2f} … {ratios[-1]:.2f}"]
        rows.append([f"{name}, {phase} of {len(pairs)} stages", *figures])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="of measured sections")
    parser.add_argument("--measure", type=Path, help="measure on this GPU first, and write this file")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.measure is not None:
        measured(options.measure)
        options.files.append(options.measure)
    report = Report("Analytic times of sections beside measured ones")
    for path in options.files or sorted((ROOT / "benchmarks" / "results").glob("sections_*.json")):
        found = json.loads(path.read_text())
        device = device_of(found["device"])
        report.line(f"\n{found['device']}: {found['note']}. Milliseconds, medians over the stages.")
        report.line("(seen): the share of the memory bandwidth was set in view of these.\n")
        rows = [row for case in found["cases"] for row in rows_of(case, device)]
        report.table(["", "predicted", "measured", "predicted ÷ measured", "from … to"], rows)
    report.save(options.output)


if __name__ == "__main__":
    main()
