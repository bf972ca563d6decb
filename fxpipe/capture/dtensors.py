"""DTensors in a trace: the model has DTensors, the graph the part of each that one process holds.

before: up.weight = DTensor(shape [64, 16], Shard(0) over 2 lanes)
after:  up.weight : f32[32, 16], a placeholder; DTensor's own ops and collectives as nodes on such parts
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxpipe.errors import CaptureError
from fxpipe.plan.dtensors import is_dtensor
from fxpipe.plan.lanes import LanePlan

#: The placements of parameters whose values are no function of a part, or of a sum of parts.
_SUPPORTED = ("Shard", "Replicate")


def like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A DTensor as this one, of another local part; the part itself where it is none."""
    if not is_dtensor(tensor):
        return part
    spec: Any = tensor
    found: torch.Tensor = type(spec).from_local(
        part, spec.device_mesh, spec.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return found


def local_gradient(grad: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """The part of a gradient that this process keeps: as its parameter is distributed.

    The gradient of a replicated parameter may be a partial sum on each lane, as that of a norm between
    sequence-parallel layers is: then it is added up here.
    """
    if not is_dtensor(of):
        return whole(grad)
    spec: Any = of
    given: Any = grad
    with torch.no_grad():
        found: torch.Tensor = given.redistribute(placements=spec.placements).to_local()
    return found


def whole(value: torch.Tensor) -> torch.Tensor:
    """The tensor that a DTensor stands for, equal on all lanes; other tensors as they are."""
    if not is_dtensor(value):
        return value
    given: Any = value
    found: torch.Tensor = given.full_tensor()
    return found


def _dtensors(model: nn.Module) -> list[tuple[str, Any]]:
    named = (*model.named_parameters(), *model.named_buffers())
    return [(name, tensor) for name, tensor in named if is_dtensor(tensor)]


def mesh_of(model: nn.Module) -> Any:
    """The mesh of the model's DTensors; None if it has none.

    Raises CaptureError, naming the tensor, for meshes of two dimensions or several meshes.
    """
    found: tuple[str, Any] | None = None
    for name, tensor in _dtensors(model):
        mesh = tensor.device_mesh
        if mesh.ndim != 1:
            raise CaptureError(
                f"{name!r} is a DTensor on a mesh of {mesh.ndim} dimensions, {mesh.mesh_dim_names}. The "
                'lanes of a rank are one dimension: give parallelize_module a part of the mesh, mesh["tp"]; '
                "replicas and ranks are fxpipe's own."
            )
        if found is not None and found[1] != mesh:
            raise CaptureError(
                f"{found[0]!r} and {name!r} are DTensors on two meshes, {found[1]} and {mesh}. All lanes "
                "of a rank share each of its ops: put both on one mesh."
            )
        found = found or (name, mesh)
    return None if found is None else found[1]


def lane_plan(model: nn.Module, number: int) -> LanePlan:
    """The shares of the lanes.  Raises CaptureError, naming the tensor, for one that is not shared evenly."""
    shards: dict[str, int] = {}
    for name, tensor in _dtensors(model):
        (placement,) = tensor.placements
        if type(placement).__name__ not in _SUPPORTED:
            raise CaptureError(
                f"{name!r} is a DTensor with the placement {placement}. Lanes hold parameters that are "
                "Shard(dim) or Replicate(): distribute it so."
            )
        if placement.is_shard():
            length = tensor.shape[placement.dim]
            if length % number:
                raise CaptureError(
                    f"{name!r} of shape {tuple(tensor.shape)} is {placement}, and {length} cannot be shared "
                    f"evenly by {number} lanes. Pad it to a multiple of {number}, or use other lanes."
                )
            shards[name] = placement.dim % tensor.dim()
    return LanePlan(number, shards)
