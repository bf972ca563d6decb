"""A case of the coverage suite: a model, its batches, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

SEED = 7


@dataclass(frozen=True)
class Subject:
    """A model with ``batch(rows)``, which makes a batch of so many rows.

    loss_fn: as of ``fxpipe.compile``; None where the model returns its loss.
    """

    model: nn.Module
    batch: Callable[[int], Any]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None


#: Builds the same subject each time, if torch's generator is in the same state.
Builder = Callable[[], Subject]


@dataclass(frozen=True)
class Case:
    library: str
    name: str
    build: Builder

    @property
    def key(self) -> str:
        return f"{self.library}/{self.name}"


def leaves_loss(output: Any, batch: Any) -> torch.Tensor:
    """A loss of any output: a number that depends on each element of each of its floating-point tensors.

    The weights differ from element to element, so that normalized outputs have a gradient as well.
    """
    total = None
    for leaf in pytree.tree_leaves(_plain(output)):
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or not leaf.requires_grad:
            continue
        weights = torch.linspace(-1, 1, leaf.numel(), dtype=leaf.dtype, device=leaf.device)
        summand = (leaf * weights.reshape(leaf.shape) + 0.1 * leaf * leaf).mean()
        total = summand if total is None else total + summand
    if total is None:
        raise ValueError("the output has no floating-point tensor that needs a gradient")
    return total


def _plain(output: Any) -> Any:
    """Hugging Face's outputs and data classes as dicts, which pytree can flatten."""
    if isinstance(output, dict):
        return {key: _plain(value) for key, value in output.items()}
    if isinstance(output, (list, tuple)):
        return [_plain(value) for value in output]
    if hasattr(output, "__dataclass_fields__"):
        return {name: _plain(getattr(output, name)) for name in output.__dataclass_fields__}
    return output


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every probability of dropping something to 0; the model stays in its mode.

    Dropout draws other numbers than eager does, so that nothing could be compared.
    """
    for module in model.modules():
        kind = type(module).__name__
        if ("Drop" in kind or "StochasticDepth" in kind) and isinstance(getattr(module, "p", None), float):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model
