"""What the choice of cuts does to drawn settings: the simulated step, its memory, and what is sent.

Models of four kinds, ranks, schedules and devices are drawn.  Each setting is compiled with and without
moving cuts to where fewer values cross (``fxpipe/compiler/choice/refine_cuts.py``), taking the most even of
those that are as light, keeping from cuts whose messages take longer than any stage (``fxpipe/partition/
cuts.py``), or the times of fused kernels, for Inductor; no model runs, all are on the meta device.

    python benchmarks/cuts.py --models 28 --seed 0 --output benchmarks/results/cuts.txt
    python benchmarks/cuts.py --without even --models 28 --seed 0 --output benchmarks/results/cuts_even.txt
    python benchmarks/cuts.py --without links --models 28 --seed 0 --output benchmarks/results/cuts_links.txt
    python benchmarks/cuts.py --without fused --models 28 --seed 0 --output benchmarks/results/cuts_fused.txt
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import numpy as np
import torch
import transformers as hf
from report import ROOT, Report
from torch import nn

import fxpipe
from fxpipe.compiler import passes
from fxpipe.compiler.choice.costing import Costing
from fxpipe.ir.graph import Kind, Phase
from fxpipe.partition import coloring, cuts
from fxpipe.plan.memory import rank_memory

sys.path.insert(0, str(ROOT / "tests"))
from zoo import captured_once

DEVICES = ("H100 SXM", "A100 SXM 80GB", "L40S", "cpu")
SCHEDULES = ("1f1b", "interleaved", "1f1b-v", "zb-h1", "zb-1p", "zb-v")
SETTINGS = 6  # of a model


class Mlps(nn.Module):
    """A language model whose blocks are MLPs alone, wider and narrower."""

    def __init__(self, width: int, words: int, factors: list[int]) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in factors)
        self.up = nn.ModuleList(nn.Linear(width, width * factor) for factor in factors)
        self.down = nn.ModuleList(nn.Linear(width * factor, width) for factor in factors)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(up(norm(x)).relu())
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def drawn_model(random: Random) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    kind = random.choice(("gpt2", "llama", "t5", "mlps"))
    layers, heads = random.randint(5, 16), random.randint(2, 24)
    width, words = 64 * heads, random.choice((512, 2048, 8192, 32000, 50257))
    length = random.choice((64, 128, 256, 512, 1024))
    model: Any
    shape: dict[str, Any]
    with torch.device("meta"):
        if kind == "gpt2":
            shape = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": length}
            shape |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            model = hf.GPT2LMHeadModel(hf.GPT2Config(**shape, vocab_size=words))
        elif kind == "llama":
            inner = random.choice((2, 3, 4)) * width
            shape = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
            shape |= {"intermediate_size": inner, "num_key_value_heads": heads}
            model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape, vocab_size=words))
        elif kind == "t5":
            shape = {"d_model": width, "d_kv": 64, "d_ff": 4 * width, "num_heads": heads}
            shape |= {"num_layers": layers // 2, "num_decoder_layers": layers // 2}
            shape |= {"decoder_start_token_id": 0, "dropout_rate": 0.0}
            model = hf.T5ForConditionalGeneration(hf.T5Config(**shape, vocab_size=words))
        else:
            model = Mlps(width, words, [random.choice((1, 2, 4)) for _ in range(layers)])
    ids = torch.zeros(random.randint(1, 4), length, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def drawn_setting(random: Random) -> dict[str, Any]:
    ranks = random.randint(2, 8)
    asked = {"ranks": ranks, "microbatches": ranks * random.randint(1, 4)}
    return {**asked, "schedule": random.choice(SCHEDULES), "costs": random.choice(DEVICES)}


def first_of_lightest(ends, weights, best, limits, speeds, others) -> list[int]:
    """In place of ``_most_even``: from the last one on, each cut as early as it can be."""
    found = [len(ends) - 1]
    for part in range(len(limits) - 1, 0, -1):
        k = found[-1]
        fits = (ends[k] - ends[:k] <= limits[part]) & (best[part - 1, :k] + weights[:k] == best[part, k])
        found.append(int(np.flatnonzero(fits)[0]))
    return found[:0:-1]


WITHOUT = {
    "lighter": lambda: patch.object(Costing, "lighter", lambda *_: None),
    "even": lambda: patch.object(cuts, "_most_even", first_of_lightest),
    "links": lambda: patch.object(coloring, "choose_cuts", lambda *given: cuts.choose_cuts(*given[:5])),
    "fused": lambda: patch.object(passes, "seconds_of_ops", lambda graph, seconds, compiled: seconds),
}


@dataclass(frozen=True)
class Found:
    """seconds: of the step.  peak: the bytes of the rank that holds the most.  bytes: that a microbatch
    sends.  cuts, one: the cuts, and those whose forward sends one value."""

    seconds: float
    peak: float
    bytes: float
    cuts: int
    one: int

    @classmethod
    def of(cls, pipe: fxpipe.Pipeline) -> Found:
        received = [
            sum(value.kind is Kind.VALUE for value in section.inputs)
            for section in pipe.sections
            if section.phase is Phase.F and section.stage
        ]
        sent = sum(edge.bytes for edge in pipe.plan.costs.edges)
        plan = pipe.plan
        peak = max(rank.peak for rank in rank_memory(plan, plan.prediction.peak_memory))
        return cls(plan.prediction.seconds, peak, sent, len(received), received.count(1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=28, help=f"each with {SETTINGS} settings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", choices=WITHOUT, default="lighter", help="what is compared")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    random, pairs = Random(options.seed), []
    for number in range(options.models):
        model, example = drawn_model(random)
        for _ in range(SETTINGS):
            key = f"cuts {options.seed} {number}"
            pairs += measured(key, options.without, model, example, drawn_setting(random))
    report = Report("Cuts")
    summarize(report, pairs)
    report.save(options.output)


def measured(
    key: str, without: str, model: nn.Module, example: Any, setting: dict[str, Any]
) -> list[tuple[Found, Found]]:
    """Without and with it; nothing where the model has too few places to cut."""

    if without == "fused":
        setting |= {"backend": "inductor"}

    def found() -> Found:
        with captured_once(key):  # the number of microbatches is a factor on which no cost depends
            return Found.of(fxpipe.compile(model, example, effort=0.3, check=False, **setting))

    try:
        with WITHOUT[without]():
            before = found()
        return [(before, found())]
    except fxpipe.FxpipeError as error:
        print(setting, error, file=sys.stderr)
        return []


def summarize(report: Report, pairs: list[tuple[Found, Found]]) -> None:
    moved = [pair for pair in pairs if pair[0] != pair[1]]
    report.line(f"\n{len(pairs)} settings; cuts were moved in {len(moved)}")
    for what, field, words in (("steps", "seconds", "longer shorter"), ("peaks", "peak", "higher lower")):
        ratios = [getattr(after, field) / getattr(before, field) for before, after in pairs]
        more, fewer = sum(r > 1 + 1e-9 for r in ratios), sum(r < 1 - 1e-9 for r in ratios)
        above, below = words.split()
        report.line(f"{what}: {more} {above}, {fewer} {below}")
        mean, least, most = statistics.mean(ratios), min(ratios), max(ratios)
        report.line(f"{what} / before: mean {mean:.4f}, least {least:.4f}, most {most:.4f}")
    report.line("")
    rows = [
        [name, *(f"{sum(getattr(pair[i], field) for pair in pairs) / unit:,.1f}" for i in (0, 1))]
        for name, field, unit in (
            ("cuts", "cuts", 1),
            ("… whose forward sends one value", "one", 1),
            ("GB of a microbatch, all settings", "bytes", 1e9),
        )
    ]
    report.table(("", "before", "after"), rows)


if __name__ == "__main__":
    main()
