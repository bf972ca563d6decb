"""Tensor parallelism of values that are DTensors anyway: the placements of weights alone.

before: up.weight [64, 16], "up": ColwiseParallel()
after:  up.weight is Shard(0) along a dimension of the mesh, and torch's rules give the rest
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from fxpipe.errors import OptionError


def share_out(
    module: nn.Module, plan: Mapping[str, ParallelStyle], mesh: DeviceMesh
) -> dict[nn.Parameter, Placement]:
    """The placements of parameters along the last dimension of the mesh, by a plan of ``parallelize_module``;
    modules whose results it wants whole give them so from now on.

    Raises OptionError for a pattern that names no module, for styles and modules that it does not know, and
    for a weight that the lanes do not share evenly.
    """
    placements: dict[nn.Parameter, Placement] = {}
    named, lanes = dict(module.named_modules()), mesh.size(-1)
    for pattern, style in plan.items():
        matching = [path for path in named if fnmatchcase(path, pattern)]
        if not matching:
            raise OptionError(f"tensor= names {pattern!r}, and the model has no such module.")
        for path in matching:
            for parameter, dim in _dims(path, named[path], style).items():
                if parameter.shape[dim] % lanes:
                    raise OptionError(
                        f"{path} has a parameter of shape {tuple(parameter.shape)}, whose dimension {dim} "
                        f"{lanes} lanes cannot share evenly. Leave {path} out of tensor=."
                    )
                if placements.setdefault(parameter, Shard(dim)) != Shard(dim):
                    raise OptionError(
                        f"{path} and another module share a parameter, which tensor= cuts in two ways. Give "
                        "both styles that cut it alike: the words RowwiseParallel(), the head "
                        "ColwiseParallel()."
                    )
            if any(layout.is_replicate() for layout in getattr(style, "output_layouts", ())):
                named[path].register_forward_hook(_whole_result)
    return placements


def _dims(path: str, module: nn.Module, style: ParallelStyle) -> dict[nn.Parameter, int]:
    """The parameters that the lanes share out, each with its dimension."""
    weight: Any = getattr(module, "weight", None)
    bias = getattr(module, "bias", None)
    of_columns = {weight: 0} | ({} if bias is None else {bias: 0})
    match module, style:
        case nn.Linear(), ColwiseParallel():
            return of_columns
        case (nn.Linear(), RowwiseParallel()) | (nn.Embedding(), ColwiseParallel()):
            return {weight: 1}
        case nn.Embedding(), RowwiseParallel():
            return {weight: 0}
    raise OptionError(
        f"tensor= has {type(style).__name__} for {path}, a {type(module).__name__}. It takes ColwiseParallel "
        "and RowwiseParallel, for nn.Linear and nn.Embedding."
    )


def _whole_result(module: nn.Module, args: object, result: torch.Tensor) -> torch.Tensor:
    """What a module gives, whole along the last dimension of the mesh."""
    if not isinstance(result, DTensor):
        return result
    return result.redistribute(placements=[*result.placements[:-1], Replicate()])
