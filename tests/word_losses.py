"""A small language model, and losses of its logits, to compute in parts of the tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import fxpipe

WORDS, WIDTH, LENGTH, ROWS, MICROBATCHES = 50, 8, 5, 3, 4
TOKENS = ROWS * LENGTH


class Words(nn.Module):
    """``bias``, ``tied``: of the output layer.  ``cap``: of its logits."""

    def __init__(
        self, bias: bool = False, tied: bool = False, cap: float | None = None, width: int = WIDTH
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.cap = nn.Embedding(WORDS, width), cap
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.head = nn.Linear(width, WORDS, bias=bias)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def flat(logits, batch):
    return logits.reshape(-1, WORDS), batch["labels"].reshape(-1)


def plain(logits, batch):
    return F.cross_entropy(*flat(logits, batch))


def shifted(logits, batch):
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))


def with_shifted_logits(logits, batch):
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), batch["labels"][:, 1:].reshape(-1))


def without_the_first(logits, batch):
    """Of casts and a scale, as logits in half precision have; with the log-sum-exp of the same rows."""
    rows = 0.5 * logits.to(torch.float64)[:, 1:]
    loss = F.cross_entropy(rows.reshape(-1, WORDS), batch["labels"][:, 1:].reshape(-1))
    return loss + 0.01 * rows.logsumexp(-1).square().mean()


def by_two(logits, batch):
    """Two losses of the same logits, each of other rows."""
    pairs = (logits[:, :-1], batch["labels"][:, 1:]), (logits[:, :-2], batch["labels"][:, 2:])
    return sum(F.cross_entropy(x.reshape(-1, WORDS), y.reshape(-1)) for x, y in pairs)


def by_all_and_some(logits, batch):
    return plain(logits, batch) + with_shifted_logits(logits, batch)


def smoothed(logits, batch):
    return F.cross_entropy(*flat(logits, batch), label_smoothing=0.1)


def with_z_loss(logits, batch):
    return plain(logits, batch) + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def with_accuracy(logits, batch):
    """What a view made of the labels has no number of autograd, as a sum of gradients has none."""
    return plain(logits, batch) + 0.1 * (logits.argmax(-1) == batch["labels"]).double().mean()


def sum_and_count(logits, batch):
    _, labels = flat(logits, batch)
    return F.cross_entropy(*flat(logits, batch), reduction="sum"), (labels != -100).sum()


def divided_by_many_ops(logits, batch):
    """The gradient needs the divisor, and autograd records no op of it: a cut may be among them."""
    rows, labels = flat(logits, batch)
    total, count = (2.0 * F.cross_entropy(rows, labels, reduction="none")).sum(), (labels != -100).sum()
    for _ in range(30):
        count = (count + 2) - 1
    return total / count


def weighted(logits, batch):
    """Each token by a number of the batch."""
    losses = F.cross_entropy(*flat(logits, batch), reduction="none")
    return (losses * (1.0 + batch["ids"].reshape(-1) % 3)).mean()


def summed_in_float32(logits, batch):
    losses = F.cross_entropy(*flat(logits, batch), reduction="none")
    sharp = logits.square().sum(-1, dtype=torch.float32).mean()
    return losses.mean(dtype=torch.float32).double() + 1e-3 * sharp.double()


def scaled(logits, batch):
    return F.cross_entropy(*flat(logits.float() / 0.7, batch)).double()


def data(rows: int = ROWS * MICROBATCHES):
    ids, labels = torch.randint(WORDS, (2, rows, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": torch.where(ids % 4 == 0, -100, labels)}


def compiled(model: nn.Module, loss, chunks: int = 3, **options) -> fxpipe.Pipeline:
    options = {"ranks": 2, "microbatches": MICROBATCHES, "schedule": "zb-h1", "loss_fn": loss} | options
    return fxpipe.compile(model, data(ROWS), head_chunks=chunks, **options)


CASES = {
    "plain": ({}, plain),
    "shifted": ({}, shifted),
    "shifted logits": ({"bias": True, "tied": True, "cap": 3.0}, with_shifted_logits),
    "all but the first logits": ({}, without_the_first),
    "bias": ({"bias": True}, plain),
    "tied": ({"tied": True}, plain),
    "capped": ({"cap": 3.0}, plain),
    "accuracy": ({}, with_accuracy),
    "smoothed": ({}, smoothed),
    "z-loss": ({}, with_z_loss),
    "sum and count": ({"bias": True}, sum_and_count),
    "divided by many ops": ({}, divided_by_many_ops),
    "weighted": ({}, weighted),
    "summed in float32": ({}, summed_in_float32),
    "scaled in float32": ({}, scaled),
}
