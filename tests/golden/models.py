"""The models whose programs are kept here.  Programs name the lines of this file: add below, not above."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS, LENGTH = 12, 8, 2, 6


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 4)

    def forward(self, x, y):
        hidden = F.gelu(self.first(x))
        hidden = hidden + torch.tanh(self.second(hidden))
        return F.mse_loss(self.third(hidden), y)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ value
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class LanguageModel(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Attention(), Attention())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, labels):
        logits = self.head(self.blocks(self.tokens(ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Noisy(nn.Module):
    """Dropout, and noise that the forward draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x, y):
        hidden = F.dropout(torch.tanh(self.first(x)), 0.25)
        return F.mse_loss(self.second(hidden + 0.1 * torch.randn_like(hidden)), y)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


class Counted(nn.Module):
    """Its loss comes from outside, with the number of rows that count."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x, y):
        return self.second(torch.tanh(self.first(x)))


def sum_and_count(output, batch):
    counts = (batch["y"] > 0).all(1)
    return (F.mse_loss(output, batch["y"], reduction="none").sum(1) * counts).sum(), counts.sum()


def with_a_metric(output, batch):
    return F.mse_loss(output, batch["y"]), {"largest": (output - batch["y"]).abs().max()}


class Mixed(nn.Module):
    """Products in bfloat16: two layers of one weight, on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x, y):
        with torch.autocast(x.device.type, torch.bfloat16):
            hidden = torch.tanh(self.first(x))
            result = self.last(hidden)
        return F.mse_loss(result.float(), y)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + F.dropout(self.outer(F.gelu(self.inner(self.norm(x)))), 0.5)


class Layers(nn.Module):
    """Blocks that repeat, four on each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(8)])
        self.last = nn.Linear(8, 4)

    def forward(self, x, y):
        return F.mse_loss(self.last(self.blocks(x)), y)
