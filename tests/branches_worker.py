"""What torchrun starts to train a model that asks its microbatches: ``train`` in each rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import BatchError

WORDS, WIDTH, LENGTH, MICROBATCHES, RATE = 5, 8, 4, 4, 0.1
ANSWERS = (False, True, True, False)
Ask = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


class Asking(nn.Module):
    """Two layers, whose use is a question of the microbatch; the questions after the first are ``more``."""

    def __init__(self, ask: Ask, *more: Ask, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ask, self.more, self.unused = ask, more, unused
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        if self.ask(x, labels, kind):
            h = h.sin() if self.unused else self.second(h).relu() + h.sin() * h.cos()
        else:
            h = self.second(h.sin())
        for ask in self.more:
            h = 2 * h if ask(x, labels, kind) else h
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def batch(yes: bool, microbatches: int = MICROBATCHES, seed: int = 0) -> dict[str, torch.Tensor]:
    """Two rows a microbatch; in each microbatch a label is ignored, or in none."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * microbatches
    labels = torch.randint(WORDS, (rows, LENGTH), generator=generator)
    if yes:
        labels[::2, 0] = -100
    x = torch.randn(rows, LENGTH, WIDTH, generator=generator)
    return {"x": x, "labels": labels, "kind": torch.full((rows,), yes)}


def ignored(x: torch.Tensor, labels: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
    return (labels == -100).any()


def compiled(ask: Ask, *more: Ask, model: Any = None, **options: Any) -> fxpipe.Pipeline:
    options = {"ranks": 2, "schedule": "1f1b", "microbatches": MICROBATCHES} | options
    return fxpipe.compile(model or Asking(ask, *more), batch(False, 1), **options)


def train(directory: Path) -> None:
    """Steps of both answers, one in which the replicas differ, and one behind it."""
    pipe = compiled(ignored, replicas=2)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=RATE)
    losses = []
    for step, yes in enumerate(ANSWERS):
        losses.append(pipe.step(batch(yes, seed=2 * step + pipe.replica)).detach())
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(BatchError, match="give both answers"):
        pipe.step(batch(pipe.replica == 0))
    losses.append(pipe.step(batch(True)).detach())
    save_file(
        {"losses": torch.stack(losses), **pipe.full_state_dict()},
        directory / f"{os.environ['RANK']}.safetensors",
    )
