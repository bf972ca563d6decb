"""Small models that several scripts train, and their data."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.scripts.script import BATCH

INPUTS, OUTPUTS, WIDTH, WORDS, LENGTH = 6, 3, 8, 12, 5


class Mlp(nn.Sequential):
    """Linear layers with tanh between them."""

    def __init__(
        self, inputs: int = INPUTS, outputs: int = OUTPUTS, width: int = WIDTH, depth: int = 4
    ) -> None:
        sizes = [inputs, *[width] * (depth - 1), outputs]
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        super().__init__(*[part for layer in layers for part in (layer, nn.Tanh())][:-1])


class Regressor(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.body = Mlp(depth=depth)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), y)


class Classifier(nn.Module):
    """Gives logits; takes the labels as well, since all leaves of a batch come to ``forward``."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.body = Mlp(depth=depth)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.body(x)


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class LanguageModel(nn.Module):
    """A causal language model in the manner of Hugging Face: with labels its output has the loss."""

    def __init__(self, depth: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.head(self.hidden(input_ids))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits)


def numbers(count: int, seed: int = 1, rows: int = BATCH) -> list[dict[str, Tensor]]:
    """Batches of a regression."""
    draw = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(rows, INPUTS, generator=draw), "y": torch.randn(rows, OUTPUTS, generator=draw)}
        for _ in range(count)
    ]


def classes(count: int, seed: int = 1, rows: int = BATCH) -> list[dict[str, Tensor]]:
    """Batches of a classification."""
    draw = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(rows, INPUTS, generator=draw),
            "labels": torch.randint(OUTPUTS, (rows,), generator=draw),
        }
        for _ in range(count)
    ]


def texts(count: int, seed: int = 1, rows: int = BATCH, length: int = LENGTH) -> list[dict[str, Tensor]]:
    """Batches of token ids, which are their own labels."""
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randint(WORDS, (rows, length), generator=draw) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in ids]
