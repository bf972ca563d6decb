"""A small language model, and plans of torch's ``parallelize_module`` for it, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from fxpipe import ContextParallel, ExpertParallel, HeadParallel, PaddedParallel

WORDS, WIDTH, HEADS, LENGTH = 24, 16, 4, 6


class Attention(nn.Module):
    """Works with all heads, and with some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(found.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Each two layers, on all tokens; works with all experts, and with some of them."""

    def __init__(self, experts: int = 4, width: int = WIDTH, inner: int = 8) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, inner) / 4)
        self.bias = nn.Parameter(torch.randn(experts, inner) / 4)
        self.down = nn.Parameter(torch.randn(experts, inner, width) / 4)

    def forward(self, x, index, weights):
        inner = torch.einsum("tw,ewi->eti", x, self.up) + self.bias.unsqueeze(1)
        each = torch.einsum("eti,eiw->etw", F.gelu(inner), self.down)
        counts = x.new_zeros(len(x), len(self.up)).scatter_add(1, index, weights)
        return torch.einsum("te,etw->tw", counts, each)


class Mixture(nn.Module):
    """Two experts for each token."""

    def __init__(self, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, experts), Experts(experts)
        self.top_k = top_k

    def forward(self, x):
        rows = x.flatten(0, -2)
        weights, index = self.router(rows).softmax(-1).topk(self.top_k)
        return self.experts(rows, index, weights / weights.sum(-1, keepdim=True)).view_as(x)


class Block(nn.Module):
    def __init__(self, dropout: float, mixture: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inner, self.outer = nn.Dropout(dropout), nn.Dropout(dropout)
        self.mixture = Mixture() if mixture else None

    def forward(self, x):
        x = x + self.attention(self.first(x))
        if self.mixture is not None:
            x = x + self.mixture(x)
        return x + self.outer(self.down(self.inner(F.gelu(self.up(self.second(x))))))


class Words(nn.Module):
    """``mixture``: whether each layer has experts, whose ops are half of those of a trace."""

    def __init__(self, dropout: float = 0.0, layers: int = 1, mixture: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout, mixture) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x, y):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), y.flatten())


def batch(rows: int) -> dict[str, torch.Tensor]:
    return {name: torch.randint(0, WORDS, (rows, LENGTH)) for name in ("x", "y")}


_COLUMNS_AND_ROWS = {
    **{f"blocks.*.attention.{name}": ColwiseParallel for name in "qkv"},
    "blocks.*.attention.o": RowwiseParallel,
    "blocks.*.up": ColwiseParallel,
    "blocks.*.down": RowwiseParallel,
}

#: name -> module, as a pattern, or "" for all -> what makes its style
PLANS: dict[str, dict[str, Callable[[], Any]]] = {
    "columns and rows": _COLUMNS_AND_ROWS,
    "vocabulary": {
        "embedding": lambda: RowwiseParallel(input_layouts=Replicate()),
        "head": lambda: ColwiseParallel(output_layouts=Replicate()),
    },
    "embedding by columns": {
        "embedding": lambda: ColwiseParallel(output_layouts=Replicate()),
    },
    "sequence": {
        "embedding": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.first": SequenceParallel,
        "blocks.*.second": SequenceParallel,
        "blocks.*.attention": lambda: PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        ),
        **{f"blocks.*.attention.{name}": ColwiseParallel for name in "qkv"},
        "blocks.*.attention.o": lambda: RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.mixture": lambda: PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=Shard(1),
        ),
        "blocks.*.mixture.experts": lambda: ExpertParallel(tokens="divided"),
        "blocks.*.up": lambda: ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": lambda: RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel,
        "head": lambda: ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    },
    "prepared output": {
        "blocks.*.up": lambda: ColwiseParallel(use_local_output=False),
        "blocks.*.down": lambda: RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "blocks.*.outer": lambda: PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate()
        ),
    },
    "experts": {"blocks.*.mixture.experts": ExpertParallel},
    "uneven": {
        "embedding": lambda: PaddedParallel(RowwiseParallel(input_layouts=Replicate())),
        **{f"blocks.*.attention.{name}": lambda: PaddedParallel(ColwiseParallel()) for name in "qkv"},
        "blocks.*.attention": HeadParallel,
        "blocks.*.attention.o": lambda: PaddedParallel(RowwiseParallel()),
        "blocks.*.mixture.experts": lambda: ExpertParallel(tokens="divided"),
        "blocks.*.up": lambda: PaddedParallel(ColwiseParallel()),
        "blocks.*.down": lambda: PaddedParallel(RowwiseParallel()),
        "head": lambda: PaddedParallel(ColwiseParallel()),
    },
    "context": {
        "blocks.*.mixture.experts": lambda: ExpertParallel(tokens="divided"),
        "": lambda: ContextParallel({"x": 1}),
    },
    "loss": {**_COLUMNS_AND_ROWS, "head": lambda: ColwiseParallel(use_local_output=False)},
}


def parallelized(model: nn.Module, mesh: Any, plan: str) -> contextlib.AbstractContextManager[Any]:
    """Make a plan's parameters DTensors; return the context in which to compile the model."""
    styles = {where: style() for where, style in PLANS[plan].items()}
    of_all = styles.pop("", None)
    parallelize_module(model, mesh, styles)
    if of_all is not None:
        parallelize_module(model, mesh, of_all)
    return loss_parallel() if plan == "loss" else contextlib.nullcontext()
