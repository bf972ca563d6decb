"""A model's DTensors, as torch's ``parallelize_module`` makes them, and the part of each that is here.

Nothing is imported for a model without DTensors.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from fxpipe.errors import CaptureError
from fxpipe.plan.lanes import LanePlan

#: The placements of parameters whose values are no function of a part, or of a sum of parts.
_SUPPORTED = ("Shard", "Replicate")


def is_dtensor_type(kind: type) -> bool:
    # Not imported: without it no tensor is a DTensor, and it takes long to load.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor, or a parameter, is a DTensor."""
    return is_dtensor_type(type(tensor))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this process holds, without a gradient's history; or the tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    part: torch.Tensor = getattr(tensor, _part(tensor))  # to_local() gives a view of a parameter's
    return part


def set_local(tensor: torch.Tensor, part: torch.Tensor) -> None:
    """Give a DTensor other memory for the part that this process holds."""
    setattr(tensor, _part(tensor), part)


def _part(tensor: Any) -> str:
    """The attribute of a DTensor that has its part."""
    (name, *_), _ = tensor.__tensor_flatten__()
    return str(name)


def _dtensors(model: nn.Module) -> list[tuple[str, Any]]:
    named = (*model.named_parameters(), *model.named_buffers())
    return [(name, tensor) for name, tensor in named if is_dtensor(tensor)]


def mesh_of(model: nn.Module) -> Any:
    """The mesh of the model's DTensors; None if it has none.

    Raises CaptureError, naming the tensor, for meshes of two dimensions or several meshes.
    """
    first: tuple[str, Any] | None = None
    for name, tensor in _dtensors(model):
        mesh = tensor.device_mesh
        if mesh.ndim != 1:
            raise CaptureError(
                f"{name!r} is a DTensor on a mesh of {mesh.ndim} dimensions, {mesh.mesh_dim_names}. The "
                'lanes of a rank are one dimension: give parallelize_module a part of the mesh, mesh["tp"]; '
                "replicas and ranks are fxpipe's own."
            )
        if first is not None and first[1] != mesh:
            raise CaptureError(
                f"{first[0]!r} and {name!r} are DTensors on two meshes, {first[1]} and {mesh}. All lanes "
                "of a rank share each of its ops: put both on one mesh."
            )
        first = first or (name, mesh)
    return None if first is None else first[1]


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
            # Shard(-1) is the last dimension.
            shards[name] = placement.dim % tensor.dim()
    return LanePlan(number, shards)
