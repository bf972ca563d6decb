"""What torchrun starts to train on batches with and without padding: ``train`` in each rank.

Every rank writes the losses of its steps, and which programs ran them, into a directory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from zoo import EFFORT

import fxpipe

LENGTH, WIDTH, MICROBATCHES, RATE = 48, 8, 4, 0.05

#: Of each step, whether the batch of a replica has padding.
PADDED = ((False, False), (True, True), (False, True), (False, False))


class Decoder(nn.Module):
    """Layers of attention under a causal mask, of which that of the batch leaves out padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        seen = self.lower(length) & mask[:, None, None, :].bool()
        for layer in self.layers:
            q, k, v = layer(x).view(len(x), length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)
        return (self.head(x).square().mean(-1) * mask).mean()

    def lower(self, length: int) -> torch.Tensor:
        return torch.ones(length, length, dtype=torch.bool).tril()


def batch_of(step: int, replica: int, padded: bool, rows: int = 2 * MICROBATCHES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    mask = torch.ones(rows, LENGTH, dtype=torch.int64)
    if padded:
        mask[1, LENGTH - 5 :] = 0
    return {"x": torch.randn(rows, LENGTH, WIDTH, generator=generator), "mask": mask}


def compiled(model: nn.Module, **options: Any) -> fxpipe.Pipeline:
    example = batch_of(0, 0, True, 2)  # what an example is padded by does not matter
    return fxpipe.compile(model, example, microbatches=MICROBATCHES, effort=EFFORT, **options)


def train(directory: Path, options: dict[str, Any]) -> None:
    pipe = compiled(Decoder(), **options)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=RATE, clip_grad_norm=0.5)
    losses, ran = [], []
    for step, padded in enumerate(PADDED):
        losses.append(pipe.step(batch_of(step, pipe.replica, padded[pipe.replica])).detach())
        ran.append(pipe._runner.last.artifact is pipe.assumed)
        optimizer.step()
        optimizer.zero_grad()
    found = {"losses": torch.stack(losses), "ran": torch.tensor(ran), "steps": torch.tensor(pipe.step_number)}
    save_file(found | pipe.full_state_dict(), directory / f"{os.environ['RANK']}.safetensors")
