"""What it saves to make quantized and normalized weights once a step, instead of for each microbatch.

A slice of a Llama 8B on four H100, simulated, with both backends; and a small one that runs here, all ranks
in one process, with and without the rule ``weights-once`` in turns.

    python benchmarks/weights_once.py --output benchmarks/results/weights_once.txt
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch
from report import Report
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from transformers import LlamaConfig, LlamaForCausalLM

import fxpipe
from fxpipe.plan.memory import rank_memory

RANKS, MICROBATCHES = 4, 8
SLICE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


class Quantized(nn.Module):
    """Four bits for groups of 32, with the gradient of the whole weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        groups = weight.unflatten(1, (-1, 32))
        scale = groups.abs().amax(-1, keepdim=True) / 7
        rounded = ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)
        return weight + (rounded - weight).detach()


class LowRank(nn.Module):
    """DoRA (arXiv 2402.09353): a trained length of each row beside a low-rank change of its direction."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.a = nn.Parameter(torch.randn(16, columns, dtype=weight.dtype, device=weight.device) / 64)
        self.b = nn.Parameter(torch.randn(rows, 16, dtype=weight.dtype, device=weight.device) / 64)
        self.length = nn.Parameter(weight.detach().norm(dim=1, keepdim=True))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        changed = weight.detach() + self.b @ self.a
        return self.length * changed / changed.norm(dim=1, keepdim=True).detach()


KINDS: dict[str, Callable[[nn.Linear], object]] = {
    "four bits": lambda x: parametrize.register_parametrization(x, "weight", Quantized()),
    "weight norm": parametrizations.weight_norm,
    "DoRA": lambda x: parametrize.register_parametrization(x, "weight", LowRank(x.weight)),
}


def model(kind: str, layers: int, words: int, sizes: dict[str, int]) -> nn.Module:
    made: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=words))
    made = made.to(torch.bfloat16) if sizes is SLICE else made
    for each in [x for x in made.model.layers.modules() if type(x) is nn.Linear]:
        KINDS[kind](each)
    return made


def compiled(made: nn.Module, ids: torch.Tensor, without: list[str], **options: Any) -> fxpipe.Pipeline:
    given = {"ranks": RANKS, "microbatches": MICROBATCHES, "schedule": "zb-h1", "check": False}
    return fxpipe.compile(made, {"input_ids": ids, "labels": ids}, without=without, **given, **options)


def planned(kind: str, backend: str) -> list[str]:
    with torch.device("meta"):
        made, ids = model(kind, 8, 128256, SLICE), torch.zeros(1, 4096, dtype=torch.long)
    texts = []
    for without in (["weights-once"], []):
        plan = compiled(made, ids, without, costs="H100", backend=backend).plan
        peak = max(rank.peak for rank in rank_memory(plan, plan.prediction.peak_memory))
        steps = plan.prediction.seconds + max(plan.costs.update.seconds)
        texts += [f"{1e3 * steps:.0f}", f"{peak / 2**30:.1f}"]
    return [kind, backend, *texts]


def measured(kind: str) -> list[str]:
    torch.manual_seed(0)
    made, ids = model(kind, 4, 512, SMALL), torch.randint(512, (4, 64))
    pipes = [compiled(made, ids, without) for without in (["weights-once"], [])]
    batch = {"input_ids": ids.repeat(MICROBATCHES, 1), "labels": ids.repeat(MICROBATCHES, 1)}
    seconds: list[list[float]] = [[], []]
    losses = [pipe.run_local(batch).loss for pipe in pipes]
    assert torch.equal(*losses)
    for _ in range(7):
        for pipe, each in zip(pipes, seconds, strict=True):
            begin = time.perf_counter()
            pipe.run_local(batch)
            each.append(time.perf_counter() - begin)
    before, after = map(statistics.median, seconds)
    saved = [max(pipe.run_local(batch, measure_memory=True).peak_saved) for pipe in pipes]
    mebibytes = [f"{x / 2**20:.1f}" for x in saved]
    return [kind, f"{1e3 * before:.0f}", f"{1e3 * after:.0f}", f"{after / before:.2f}", *mebibytes]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    report = Report("Weights once a step")
    report.line(
        f"\nSimulated: 8 layers of a Llama 8B, {RANKS} H100, {MICROBATCHES} microbatches, with updates"
    )
    head = ("", "backend", "ms before", "GiB", "ms after", "GiB")
    report.table(head, [planned(kind, backend) for kind in KINDS for backend in ("eager", "inductor")])
    report.line("\nMeasured: a small one in this process, with the same bits; saved by the rank with most")
    head = ("", "ms before", "ms after", "ratio", "MiB before", "MiB after")
    report.table(head, [*map(measured, KINDS)])
    report.save(options.output)


if __name__ == "__main__":
    main()
