"""Runs the Python of pages, block by block, on names that their text takes for granted."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fxpipe

ROOT = Path(__file__).parents[1]
ROWS, LENGTH, WORDS, MICROBATCHES = 2, 4, 12, 16


class Model(nn.Module):
    """A language model in small: eight blocks; the loss if there are labels, and logits."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8)) for _ in range(8)
        )
        self.head = nn.Linear(8, WORDS, bias=False)

    def forward(self, input_ids, labels=None):
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss, logits)


class Output(dict):
    """``output.loss`` and ``output["loss"]``, as models of transformers give it."""

    def __init__(self, loss, logits):
        super().__init__(({} if loss is None else {"loss": loss}) | {"logits": logits})
        self.__dict__ = self


def blocks(page: str) -> list[str]:
    """The blocks of Python of a page that are whole: an ellipsis stands for something else."""
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in found if "…" not in block.replace("# rank0.py … rank3.py", "")]


def run(pages: Sequence[str], directory: str) -> None:
    os.chdir(directory)
    torch.manual_seed(0)
    rows = torch.randint(WORDS, (2 * MICROBATCHES * ROWS, LENGTH))
    batches = [{"input_ids": part, "labels": part} for part in rows.split(MICROBATCHES * ROWS)]
    example = {name: tensor[:ROWS] for name, tensor in batches[0].items()}
    names = {
        **{"torch": torch, "F": F, "DataLoader": DataLoader, "fxpipe": fxpipe, "os": os},
        **{"model": Model(), "example": example, "loader": batches, "batch": batches[0]},
        **{"batch_of": lambda step: batches[step % 2], "steps": 3, "data": list(rows)},
    }
    for page in pages:
        for block in blocks(page):
            exec(compile(block, page, "exec"), names)
            print("ran", block.splitlines()[0])
