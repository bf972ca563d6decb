"""Subjects by the shape of what they take: most libraries' models take an image, a sequence or words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.model_coverage.case import Builder, Subject, leaves_loss

CLASSES, VOCABULARY = 4, 64


class Fed(nn.Module):
    """Gives a model its inputs in the order of their names, without the target."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, target: torch.Tensor | None = None, **inputs: torch.Tensor) -> Any:
        return self.model(*inputs.values())


def numbers(build: Callable[[], nn.Module], *shapes: tuple[int, ...], loss: Any = leaves_loss) -> Builder:
    """A model of tensors of random numbers; the shapes are without rows."""

    def make() -> Subject:
        def batch(rows: int) -> tuple[torch.Tensor, ...]:
            return tuple(torch.randn(rows, *shape) for shape in shapes)

        return Subject(build(), batch, loss)

    return make


def classifier(build: Callable[[], nn.Module], *shape: int) -> Builder:
    """A model from numbers to the scores of a row's classes, or to a tuple or dict of several such."""

    def make() -> Subject:
        def batch(rows: int) -> dict[str, torch.Tensor]:
            return {"x": torch.randn(rows, *shape), "target": torch.randint(CLASSES, (rows,))}

        return Subject(Fed(build()), batch, _class_loss)

    return make


def _class_loss(output: Any, batch: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor) and output.dim() == 2 and output.shape[1] >= CLASSES:
        return F.cross_entropy(output, batch["target"])
    return leaves_loss(output, batch)


def words(build: Callable[[], nn.Module], length: int = 12, vocabulary: int = VOCABULARY) -> Builder:
    """A language model from token ids to scores of each position's next token."""

    def make() -> Subject:
        def batch(rows: int) -> dict[str, torch.Tensor]:
            tokens = torch.randint(vocabulary, (rows, length + 1))
            return {"x": tokens[:, :-1].contiguous(), "target": tokens[:, 1:].contiguous()}

        return Subject(Fed(build()), batch, _word_loss)

    return make


def _word_loss(output: Any, batch: Any) -> torch.Tensor:
    scores = output if isinstance(output, torch.Tensor) else output[0]
    return F.cross_entropy(scores.flatten(0, 1), batch["target"].flatten())
