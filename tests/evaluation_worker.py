"""What torchrun starts to train and to evaluate in turns: ``evaluation_worker.py DIRECTORY``.

Every rank writes the losses that it found into the directory, as ``NAME.RANK.safetensors``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from zoo import CASES, EFFORT, WIDTH, Block, Case, cut, numbers

import fxpipe

MICROBATCHES = 4
STEPS, LEARNING_RATE = 2, 0.05


class Normed(nn.Module):
    """Batch norms, whose statistics evaluation reads."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        blocks = [nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)) for _ in range(4)]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x, y):
        x = self.blocks(x)
        return {"logits": x, "loss": F.mse_loss(x, y)}


class Constants(Normed):
    """Constants that the model makes itself."""

    def forward(self, x, y):
        for k, block in enumerate(self.blocks):
            x = block(x) * torch.tensor([1.0 + k / 8] * WIDTH)
        return F.mse_loss(x, y)


class Noisy(Normed):
    """Dropout as well."""

    def __init__(self) -> None:
        super().__init__(0.3)


#: Cases without random numbers, whose training can be repeated by eager PyTorch; how each is compiled.
TRAINED = {
    "norms": Case(Normed, numbers, rows=3),
    "constants": Case(Constants, numbers, rows=3),
    "vocabulary": CASES["tied_head"],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "norms": {"schedule": "zb-v", "stages_per_rank": 2},
    "constants": {"schedule": "1f1b"},
    "vocabulary": {"schedule": "1f1b", "vocab_parallel": True},
}
RANKS_OF_NORMS = {4: {"schedule": "zb-h1"}}  # 12 stages would be too many


def loss_of(output: Any) -> torch.Tensor:
    return output["loss"] if isinstance(output, dict) else output


def evaluated(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Loss and logits of the batch, of model.eval()."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        parts = [model(**part) for part in cut(batch, MICROBATCHES)]
    for module, mode in modes.items():
        module.training = mode
    found = {"loss": torch.stack([loss_of(part) for part in parts]).mean()}
    return (
        found
        if parts[0] is loss_of(parts[0])
        else found | {"logits": torch.cat([p["logits"] for p in parts])}
    )


def trained_alone(case: Case) -> dict[str, torch.Tensor]:
    """The losses of training and evaluation in turns, in eager PyTorch."""
    model, batch = case.build(), case.data(MICROBATCHES)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, evaluations = [], []
    for _ in range(STEPS):
        parts = [loss_of(model(**part)) for part in cut(batch, MICROBATCHES)]
        losses.append(torch.stack(parts).mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        evaluations.append(evaluated(model, batch)["loss"])
    return {"training": torch.stack(losses), "evaluation": torch.stack(evaluations)}


def main(directory: Path) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name, case in TRAINED.items():
        options = RANKS_OF_NORMS.get(ranks, OPTIONS[name]) if name == "norms" else OPTIONS[name]
        pipe = fxpipe.compile(
            case.build(),
            case.example(),
            ranks=ranks,
            microbatches=MICROBATCHES,
            effort=EFFORT,
            evaluation=True,
            **options,
        )
        optimizer = pipe.optimizer(torch.optim.SGD, lr=LEARNING_RATE)
        batch, losses, evaluations = case.data(MICROBATCHES), [], []
        for _ in range(STEPS):
            losses.append(pipe.step(batch))
            optimizer.step()
            optimizer.zero_grad()
            evaluations.append(pipe.evaluate(batch))
        pipe.save(directory / name)
        loaded = fxpipe.load(directory / name)
        loaded.save(directory / f"{name} again")
        loaded = loaded.evaluate(batch)
        found = {"training": torch.stack(losses), "evaluation": torch.stack(evaluations), "loaded": loaded}
        save_file(found, directory / f"{name}.{rank}.safetensors")


class Guarded(nn.Module):
    """Divides by a sum of weights and a fixed number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x, weights):
        return (self.layer(x).tanh().square()[:, 0] * weights).sum() / (weights.sum() + 1)


def rows_of(replica: int) -> dict[str, torch.Tensor]:
    """As many as a step takes, and two fewer."""
    numbers = torch.Generator().manual_seed(replica)
    rows = 6 - 2 * replica
    return {"x": torch.randn(rows, WIDTH, generator=numbers), "weights": torch.rand(rows, generator=numbers)}


def of_replicas(directory: Path) -> None:
    rank, model = int(os.environ["RANK"]), Guarded()
    example = {name: value[:2] for name, value in rows_of(0).items()}
    given = {"ranks": 1, "replicas": 2, "microbatches": 3, "schedule": "1f1b", "evaluation": True}
    pipe = fxpipe.compile(model, example, **given)
    save_file({"loss": pipe.evaluate(rows_of(rank))}, directory / f"{rank}.safetensors")
