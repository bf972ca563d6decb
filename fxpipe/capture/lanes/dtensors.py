"""DTensors in a trace: the model has DTensors, the graph the part of each that one process holds.

before: up.weight = DTensor(shape [64, 16], Shard(0) over 2 lanes)
after:  up.weight : f32[32, 16], a placeholder; DTensor's own ops and collectives as nodes on such parts
"""

from __future__ import annotations

from typing import Any

import torch

from fxpipe.plan.dtensors import is_dtensor


def like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A DTensor as this one, of another local part; the part itself where it is none."""
    if not is_dtensor(tensor):
        return part
    spec: Any = tensor
    distributed: torch.Tensor = type(spec).from_local(
        part, spec.device_mesh, spec.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return distributed


def local_gradient(grad: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """The part of a gradient that this process keeps: as its parameter is distributed.

    The gradient of a replicated parameter may be a partial sum on each lane, as that of a norm between
    sequence-parallel layers is: then it is added up here.
    """
    if not is_dtensor(of):
        return whole(grad)
    spec: Any = of
    distributed: Any = grad
    with torch.no_grad():
        part: torch.Tensor = distributed.redistribute(placements=spec.placements).to_local()
    return part


def whole(value: torch.Tensor) -> torch.Tensor:
    """The tensor that a DTensor stands for, equal on all lanes; other tensors as they are."""
    if not is_dtensor(value):
        return value
    distributed: Any = value
    full: torch.Tensor = distributed.full_tensor()
    return full
