"""A model's DTensors, as torch's ``parallelize_module`` makes them, and the part of each that is here.

Nothing is imported for a model without DTensors.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from torch import nn

from fxpipe.errors import CaptureError
from fxpipe.plan.lanes import LaneAxis, LanePlan

#: The placements of parameters whose values are no function of a part, or of a sum of parts.
_SUPPORTED = ("Shard", "Replicate")
#: The attribute of a module with the lengths of its parameters that end with zeros.
_LENGTHS = "_fxpipe_lengths"


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
    """The mesh of the lanes, which has all dimensions on which the model has DTensors; None if it has none.

    Raises CaptureError, naming the tensors, where they are on parts of different meshes.
    """
    meshes: dict[Any, str] = {}
    for name, tensor in _dtensors(model):
        meshes.setdefault(tensor.device_mesh, name)
    if len(meshes) < 2:
        return next(iter(meshes), None)
    (first, name), (second, other), *_ = meshes.items()
    roots = {mesh._get_root_mesh() for mesh in meshes}
    names = {x for mesh in meshes for x in mesh.mesh_dim_names or ()}
    known = [x for root in roots for x in root.mesh_dim_names or ()]
    if len(roots) > 1 or not names <= {*known} or not all(mesh.mesh_dim_names for mesh in meshes):
        raise CaptureError(
            f"{name!r} and {other!r} are DTensors on two meshes, {first} and {second}. All lanes of a rank "
            "share each of its ops: put both on one mesh, or on parts of one by the names of its dimensions, "
            'as mesh["ep"] and mesh["tp"] are.'
        )
    (root,) = roots
    return root[tuple(x for x in known if x in names)]


def lane_plan(model: nn.Module, mesh: Any) -> LanePlan:
    """The shares of the lanes, which ``mesh_of`` gives.  Raises CaptureError, naming the tensor, for one that
    is not shared evenly."""
    shards: list[dict[str, int]] = [{} for _ in mesh.shape]
    for name, tensor in _dtensors(model):
        counts: Counter[int] = Counter()
        for placement, axis in zip(tensor.placements, axes_of(tensor.device_mesh, mesh), strict=True):
            if type(placement).__name__ not in _SUPPORTED:
                raise CaptureError(
                    f"{name!r} is a DTensor with the placement {placement}. Lanes hold parameters that are "
                    "Shard(dim) or Replicate(): distribute it so."
                )
            if not placement.is_shard() or mesh.shape[axis] == 1:
                continue
            dim = placement.dim % tensor.dim()  # Shard(-1) is the last dimension
            shards[axis][name] = dim
            counts[dim] = (counts[dim] or 1) * mesh.shape[axis]
            if tensor.shape[dim] % counts[dim]:
                raise CaptureError(
                    f"{name!r} of shape {tuple(tensor.shape)} is {placement}, and {tensor.shape[dim]} cannot "
                    f"be shared evenly by {counts[dim]} lanes. Use other lanes, or fxpipe.PaddedParallel("
                    "style), which pads the parameters of a module."
                )
    return LanePlan(tuple(map(LaneAxis, mesh.shape, shards)), _lengths(model))


def _lengths(model: nn.Module) -> dict[str, int]:
    """The parameters that end with zeros, as ``note_length`` has noted, by their first names.

    Raises CaptureError for one that a module shares which reads the zeros.
    """
    slots = [
        (f"{path}.{short}" if path else short, shape_of(module, short), parameter)
        for path, module in model.named_modules()
        for short, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if is_dtensor(parameter)
    ]
    names: dict[int, str] = {}
    lengths: dict[str, int] = {}
    for name, shape, parameter in slots:
        first = names.setdefault(id(parameter), name)
        if shape != parameter.shape:
            lengths[first] = next(n for n, whole in zip(shape, parameter.shape, strict=True) if n != whole)
    for name, shape, parameter in slots:
        first = names[id(parameter)]
        if first in lengths and shape == parameter.shape:
            raise CaptureError(
                f"{name!r} is {first!r}, which has zeros behind its {lengths[first]} rows or "
                "columns. Give the modules of both the style PaddedParallel, before they share it."
            )
    return lengths


def shape_of(module: nn.Module, name: str) -> torch.Size:
    """The shape of a parameter or buffer of a module; without the zeros that ``note_length`` has noted."""
    tensor: Any = getattr(module, name)
    length = module.__dict__.get(_LENGTHS, {}).get(name)
    if length is None or not is_dtensor(tensor):
        return torch.Size(tensor.shape)
    dim = next(placement.dim for placement in tensor.placements if placement.is_shard())
    return torch.Size((*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]))


def note_length(module: nn.Module, name: str, length: int) -> None:
    """Note that zeros are behind this length of the dimension of a parameter that lanes share out."""
    module.__dict__.setdefault(_LENGTHS, {})[name] = length


def axes_of(part: Any, mesh: Any) -> list[int]:
    """The dimensions of a mesh that a part of it has, in its order."""
    if part.ndim == mesh.ndim:
        return [*range(mesh.ndim)]
    return [mesh.mesh_dim_names.index(name) for name in part.mesh_dim_names]
