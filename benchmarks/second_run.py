"""What the second run of the forward adds to compiling a model of one's own (docs/models.md, "Python state").

A line a model, whose code lies outside of installed packages: compilations in one process, in turns without
the second run and with it; the processor's seconds of each, as medians, and the calls of functions in one
compilation each, which do not depend on what else the machine does.  The second run of the model with a
counter differs from its first op on, so that all of it is recorded and compared, and the user is warned.

    python benchmarks/second_run.py --output benchmarks/results/second_run.txt
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import pstats
import statistics
import sys
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
from fxpipe.capture.step_function import StepFunction

WIDTH, HEADS, LENGTH, VOCABULARY = 64, 4, 32, 128
#: What compiling with the second run may take, relative to compiling without it, where it does not differ.
BAR = 1.15


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
    """``growth``: what each step adds to the factor of the input, which is 1 in the first one."""

    def __init__(self, depth: int, growth: float):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(*(Convolution() for _ in range(depth)))
        self.head, self.factor, self.growth = nn.Linear(16, 10), 1.0, growth

    def forward(self, x: Any, labels: Any) -> Any:
        x = x * self.factor
        self.factor += self.growth
        return F.cross_entropy(self.head(self.blocks(self.stem(x)).mean((2, 3))), labels)


def language(make: Callable[[], nn.Module], layers: int) -> tuple[nn.Module, dict[str, Any]]:
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    return LanguageModel([make() for _ in range(layers)]), {"ids": ids, "labels": ids}


def llama(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    rotation = Rotation()
    return language(lambda: LlamaBlock(rotation), layers)


def convolutions(depth: int, growth: float = 0.0) -> tuple[nn.Module, dict[str, Any]]:
    example = {"x": torch.zeros(2, 3, 16, 16), "labels": torch.zeros(2, dtype=torch.long)}
    return ConvNet(depth, growth), example


DIFFERENT = "ResNet, 16 blocks, a counter"
MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "GPT-2, 4 layers": lambda: language(Block, 4),
    "GPT-2, 12 layers": lambda: language(Block, 12),
    "Llama, 8 layers, a kept table": lambda: llama(8),
    "ResNet, 16 blocks": lambda: convolutions(16),
    DIFFERENT: lambda: convolutions(16, growth=1.0),
    "small ops, 18 layers": lambda: small_ops(18),
}


def compiled(name: str, again: bool) -> None:
    model, example = MODELS[name]()
    gc.collect()
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        if not again:
            stack.enter_context(patch.object(StepFunction, "_repeat", lambda *args: ""))
        compile(model, example, ranks=4, microbatches=8, schedule="1f1b")


def seconds(name: str, again: bool) -> float:
    before = time.process_time()
    compiled(name, again)
    return time.process_time() - before


def calls(name: str, again: bool) -> int:
    profiler = cProfile.Profile()
    profiler.runcall(compiled, name, again)
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
    rows, over = [], []
    for name in options.models:
        compiled(name, True)  # fills torch's caches
        few, many = (calls(name, again) for again in (False, True))
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(options.rounds):
            for again, times in found.items():
                times.append(seconds(name, again))
        without, beside = (statistics.median(times) for times in found.values())
        cells = f"{without:.2f}", f"{beside:.2f}", f"{beside / without:.2f}"
        print(f"{name}: {many / few:.3f}", file=sys.stderr)
        rows.append([name, *cells, f"{few:,}", f"{many:,}", f"{many / few:.3f}"])
        if name != DIFFERENT and many / few > BAR:
            over.append(name)
    columns = "seconds without", "with", "ratio", "calls without", "with", "ratio"
    report.table(["model", *columns], rows)
    report.line(f"over the bar of {BAR}, in calls: {', '.join(over) or 'none'}")
    report.save(options.output)


if __name__ == "__main__":
    main()
