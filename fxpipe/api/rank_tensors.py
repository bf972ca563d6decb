"""The tensors of a model that a rank of its pipeline needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxpipe.errors import CaptureError
from fxpipe.plan.artifact import Plan
from fxpipe.plan.attribute_state import kept_tensors
from fxpipe.plan.dtensors import is_dtensor, local


def held_of(
    model: nn.Module, plan: Plan, rank: int | None
) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """The parameters and buffers of the model that a rank needs; of all ranks, with None."""
    needed = plan.tensors if rank is None else (plan.tensors[rank],)
    names = {each for tensors in needed for name in tensors.state for each in (name, name.tensor)}
    # Frozen parameters that the step changes are buffers of the pipeline.
    changed = {name for tensors in plan.tensors for name in tensors.buffers}
    registered = (*model.named_parameters(), *model.named_buffers())
    parts = {n: _part_of(n, t, plan, rank is None) for n, t in registered if n in names}
    trained = {n for n, _ in model.named_parameters()} - changed
    parameters: dict[str, Any] = {n: t for n, t in parts.items() if n in trained}
    buffers = {n: t for n, t in parts.items() if n not in trained}
    attributes = {n for tensors in needed for n in tensors.buffers} - buffers.keys()
    buffers |= kept_tensors(model, attributes)
    if missing := attributes - buffers.keys():
        raise CaptureError(
            f"The model of this rank has no {min(missing)}, which that of rank 0 keeps. Run the model on one "
            "batch on all ranks before you compile it."
        )
    return parameters, buffers


def _part_of(name: str, tensor: torch.Tensor, plan: Plan, alone: bool) -> torch.Tensor:
    """The part of a DTensor that this process has; the whole, without values yet, where it runs all lanes."""
    if not is_dtensor(tensor):
        return tensor
    part = local(tensor).detach()
    if alone and name in plan.lanes.shared:
        part = plan.whole_layout(name).empty(torch.device("meta"))
    return nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part
