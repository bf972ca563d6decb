"""What the second run of the forward adds to compiling a model of one's own (docs/models.md, "Python state").

A line a model, whose code lies outside of installed packages: compilations in one process, in turns with the
second run and without it; the processor's seconds of each, as medians, and the calls of functions in one
compilation each, which do not depend on what else the machine does.  Then the same with the second run
recorded, as it is from the first op on that differs: for a counter that scales the input.

    python benchmarks/second_run.py --output benchmarks/results/second_run.txt
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from compile_time import _small_ops as small_ops
from report import Report
from torch import nn
from torch.nn import functional as F

from fxpipe import compile
from fxpipe.capture.trace import _Function

WIDTH, HEADS, LENGTH, VOCABULARY = 64, 4, 32, 128
#: What compiling with the second run may take, relative to compiling without it.
BAR = 1.15


class Counter(nn.Module):
    """A model whose second run differs from its first op on."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.steps = model, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return self.model(*args, **kwargs) * self.steps


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        shape = (*x.shape[:2], HEADS, -1)
        q, k, v = (y.view(shape).transpose(1, 2) for y in self.attention(self.norms[0](x)).split(WIDTH, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh")))


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Rotation(nn.Module):
    """Keeps its tables from the first forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: Any = None

    def forward(self, x: Any) -> Any:
        if self.tables is None:
            steps = torch.arange(0, x.shape[-1], 2) / x.shape[-1]
            angle = torch.arange(x.shape[-2])[:, None] / 10000**steps
            self.tables = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        cosine, sine = self.tables
        left, right = x.chunk(2, -1)
        return x * cosine + torch.cat((-right, left), -1) * sine


class LlamaBlock(nn.Module):
    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.norms, self.rotation = nn.ModuleList([RMSNorm(), RMSNorm()]), rotation
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        y = self.norms[0](x)
        q, k, v = (p(y).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.rotation(q), self.rotation(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    def __init__(self, blocks: list[nn.Module]):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Any, labels: Any) -> Any:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))

    def forward(self, x: Any) -> Any:
        y = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(x + self.norms[1](self.convs[1](y)))


class ConvNet(nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        self.stem, self.blocks = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Sequential(*(Convolution() for _ in range(depth))),
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Any, labels: Any) -> Any:
        return F.cross_entropy(self.head(self.blocks(self.stem(x)).mean((2, 3))), labels)


def language(make: Callable[[], nn.Module], layers: int) -> tuple[nn.Module, dict[str, Any]]:
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    return LanguageModel([make() for _ in range(layers)]), {"ids": ids, "labels": ids}


def llama(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    rotation = Rotation()
    return language(lambda: LlamaBlock(rotation), layers)


def convolutions(depth: int) -> tuple[nn.Module, dict[str, Any]]:
    return ConvNet(depth), {"x": torch.zeros(2, 3, 16, 16), "labels": torch.zeros(2, dtype=torch.long)}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "GPT-2, 4 layers": lambda: language(Block, 4),
    "GPT-2, 12 layers": lambda: language(Block, 12),
    "Llama, 8 layers": lambda: llama(8),
    "ResNet, 16 blocks": lambda: convolutions(16),
    "small ops, 30 layers": lambda: small_ops(30),
}


def compiled(name: str, again: bool, counts: bool = False) -> Any:
    model, example = MODELS[name]()
    model = Counter(model) if counts else model
    skipped = patch.object(_Function, "_repeat", lambda *args: "")
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if again:
            return compile(model, example, ranks=4, microbatches=8, schedule="1f1b")
        with skipped:
            return compile(model, example, ranks=4, microbatches=8, schedule="1f1b")


def seconds(name: str, again: bool, counts: bool = False) -> float:
    before = time.process_time()
    compiled(name, again, counts)
    return time.process_time() - before


def calls(name: str, again: bool, counts: bool = False) -> int:
    profiler = cProfile.Profile()
    profiler.runcall(compiled, name, again, counts)
    return pstats.Stats(profiler).total_calls  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--rounds", type=int, default=5, help="compilations of each; the median is shown")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    report = Report("Second run of the forward")
    rows = []
    for counts in (False, True):
        for name in options.models:
            compiled(name, True, counts)
            runs: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(options.rounds):
                for again, found in runs.items():
                    found.append(seconds(name, again, counts))
            without, with_it = (statistics.median(found) for found in runs.values())
            called = [calls(name, again, counts) for again in runs]
            rows.append(
                [
                    name,
                    "recorded" if counts else "",
                    f"{without:.2f}",
                    f"{with_it:.2f}",
                    f"{with_it / without:.2f}",
                    *(f"{n:,}" for n in called),
                    f"{called[1] / called[0]:.2f}",
                ]
            )
            print(rows[-1], flush=True)
    report.table(["model", "", "without", "with it", "ratio", "calls without", "with it", "ratio"], rows)
    report.save(options.output)


if __name__ == "__main__":
    main()
