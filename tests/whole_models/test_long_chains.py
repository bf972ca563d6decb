"""Chains of ops that are longer than Python's stack, wherever the compiler takes their ops one by one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import assert_equals_eager
from torch import nn
from zoo import WIDTH, WORDS, tokens

OPS = 400


def chain(x: torch.Tensor) -> torch.Tensor:
    for k in range(OPS):
        x = x + k % 2 * 2 - 1 if not x.is_floating_point() else x * (1 + 1e-5)
    return x


class Scaled(nn.Module):
    """Layers of which each computes the same long chain."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * chain(ids.to(x.dtype)).sigmoid().unsqueeze(-1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(chain(ids))
        for layer in self.layers:
            x = layer(x, ids)
        of_words = chain(ids.to(x.dtype).unsqueeze(-1).expand(*ids.shape, WORDS))
        logits = chain(x @ self.table.weight.t()) + 1e-2 * of_words
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return chain(losses).sum() / chain((labels >= 0).sum())


@pytest.fixture
def short_stack() -> Iterator[None]:
    """A limit that a call for each op of a chain exceeds, and nothing else."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + OPS)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.slow
@pytest.mark.variation
@pytest.mark.usefixtures("double", "short_stack")
@pytest.mark.parametrize("head", [{"vocab_parallel": "1-barrier"}, {"head_chunks": 2}], ids=str)
def test_chains_longer_than_the_stack(head: dict[str, Any]) -> None:
    assert_equals_eager(Net, tokens, microbatches=2, steps=1, ranks=2, schedule="1f1b", **head)
