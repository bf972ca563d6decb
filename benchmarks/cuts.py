"""Where models are cut: the bytes that cross, and the simulated step, beside another checkout's.

A line a model, over 2 to 8 stages or as many as it has: the bytes that a microbatch sends, there and back;
the stages whose forward receives one tensor; and the seconds of the simulated steps, relative to those of the
other checkout, on average and at worst.  No model runs: those of transformers are on the meta device.

    python benchmarks/cuts.py --beside ../older --output benchmarks/results/cuts.txt
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import ROOT, Report, revision

STAGES = range(2, 9)
SCHEDULES = ("1f1b", "zb-h1")
MICROBATCHES = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="of the zoo and of this file (default: all)")
    parser.add_argument("--beside", type=Path, required=True, help="a checkout of another revision")
    parser.add_argument("--every", action="store_true", help="a line for every number of stages, too")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measured(options.models)))
        return
    report = Report("Cuts")
    report.line(f"  beside    {revision(options.beside)}")
    report.line(f"  steps     {', '.join(SCHEDULES)}, {MICROBATCHES} microbatches\n")
    before, after = (_of(root, options.models) for root in (options.beside, ROOT))
    rows, ratios = [], []
    for name in after:
        pairs = [(before[name][key], after[name][key]) for key in after[name]]
        if options.every:
            rows += [_row(f"{name}, {key}", [pair]) for key, pair in zip(after[name], pairs, strict=True)]
        rows.append(_row(name, pairs))
        ratios += _ratios(pairs)
    columns = (
        "model",
        "cuts",
        "kB before",
        "after",
        "one tensor",
        "after",
        "step / before",
        "at worst",
    )
    report.table(columns, rows)
    report.line(f"\nof all steps: {_spread(ratios)}")
    report.save(options.output)


def _row(name: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    ratios = _ratios(pairs)

    def total(key: str, which: int) -> int:
        return sum(pair[which][key] for pair in pairs)

    return [
        name, str(total("cuts", 1)), *(f"{total('bytes', i) / 1e3:,.1f}" for i in (0, 1)),
        *(str(total("one", i)) for i in (0, 1)), f"{statistics.mean(ratios):.4f}", f"{max(ratios):.4f}",
    ]  # fmt: skip


def _ratios(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[float]:
    return [b / a for x, y in pairs for a, b in zip(x["seconds"], y["seconds"], strict=True)]


def _spread(ratios: list[float]) -> str:
    faster, slower = (sum(r < 0.9999 for r in ratios), sum(r > 1.0001 for r in ratios))
    return (
        f"{len(ratios)}, {faster} faster and {slower} slower; mean {statistics.mean(ratios):.4f}, "
        f"{min(ratios):.4f} to {max(ratios):.4f}"
    )


def _of(root: Path, models: list[str]) -> dict[str, dict[str, Any]]:
    """The result of ``measured`` of a checkout, in a fresh process."""
    path = os.pathsep.join([str(root), str(ROOT / "benchmarks"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, Path(__file__), *models, "--beside", ".", "--once"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def measured(names: list[str]) -> dict[str, dict[str, Any]]:
    """Per model and number of stages the cuts, bytes and steps."""
    from fxpipe.errors import PartitionError

    warnings.simplefilter("ignore")
    found: dict[str, dict[str, Any]] = {}
    for name, case in _models().items():
        if names and name not in names:
            continue
        found[name], made = {}, case.build()
        for stages in STAGES:
            try:
                found[name][str(stages)] = _measured(name, made, case, stages)
            except PartitionError:
                break
    return found


def _measured(name: str, made: tuple[Any, Any, Any], case: Model, stages: int) -> dict[str, Any]:
    from zoo import captured_once

    from fxpipe import compile
    from fxpipe.ir.graph import Kind, Phase

    model, example, loss_fn = made
    pipes = []
    for schedule in SCHEDULES:
        with captured_once(name):
            setting = {"ranks": stages, "microbatches": MICROBATCHES, "schedule": schedule}
            pipes.append(compile(model, example, loss_fn=loss_fn, costs=case.costs, **setting))
    forward = [section for section in pipes[0].sections if section.phase is Phase.F]
    received = [[v for v in section.inputs if v.kind is Kind.VALUE] for section in forward]
    return {
        "cuts": stages - 1,
        "one": sum(len(values) == 1 for values in received),
        "bytes": sum(edge.bytes for edge in pipes[0].plan.costs.edges),
        "seconds": [pipe.plan.prediction.seconds for pipe in pipes],
    }


@dataclass(frozen=True)
class Model:
    """``build``: the model, its example and its loss function, if any; ``costs``: of this device."""

    build: Callable[[], tuple[Any, Any, Any]]
    costs: str = "analytic"


def _models() -> dict[str, Model]:
    import torch
    import transformers as hf
    from zoo import CASES

    def of_zoo(case: Any) -> Model:
        return Model(lambda: (case.build(), case.example(), case.loss_fn))

    def language(make: Callable[[], Any], rows: int, length: int, costs: str) -> Model:
        def build() -> tuple[Any, Any, Any]:
            with torch.device("meta"):
                model = make()
            ids = torch.zeros(rows, length, dtype=torch.long)
            return model, {"input_ids": ids, "labels": ids}, None

        return Model(build, costs)

    def gpt2(layers: int, width: int, words: int, rows: int, length: int, costs: str) -> Model:
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        shape = {"n_layer": layers, "n_embd": width, "n_head": width // 32, "n_positions": length}
        config = hf.GPT2Config(**shape, vocab_size=words, **still)
        return language(lambda: hf.GPT2LMHeadModel(config), rows, length, costs)

    def llama(layers: int, width: int, rows: int, length: int, costs: str) -> Model:
        config = hf.LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width,
            num_attention_heads=width // 64, num_key_value_heads=width // 256, vocab_size=32000,
        )  # fmt: skip
        return language(lambda: hf.LlamaForCausalLM(config), rows, length, costs)

    return {
        "GPT-2 of make demo": gpt2(8, 192, 2048, 2, 128, "analytic"),
        "GPT-2, 12 layers, cpu": gpt2(12, 768, 50257, 1, 1024, "analytic"),
        "GPT-2, 12 layers, A100": gpt2(12, 768, 50257, 8, 1024, "A100 SXM 80GB"),
        "GPT-2, 48 layers, A100": gpt2(48, 1600, 50257, 4, 1024, "A100 SXM 80GB"),
        "Llama, 12 layers, cpu": llama(12, 512, 1, 512, "analytic"),
        "Llama, 16 layers, H100": llama(16, 2048, 2, 2048, "H100 SXM"),
        "Llama, 32 layers, L40S": llama(32, 4096, 1, 2048, "L40S"),
        **{name: of_zoo(case) for name, case in CASES.items()},
    }


if __name__ == "__main__":
    main()
