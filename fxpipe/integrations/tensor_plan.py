"""Tensor parallelism of values that are DTensors anyway: the placements of weights alone.

before: up.weight [64, 16], "up": ColwiseParallel()
after:  up.weight is Shard(0) along a dimension of the mesh, and torch's rules give the rest
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

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
            for name, dim in dims_of(named[path], style, f"tensor= of {path}").items():
                parameter = named[path].get_parameter(name)
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


def dims_of(module: nn.Module, style: ParallelStyle, what: str) -> dict[str, int]:
    """The parameters of a module that a style shares out, by name, each with its dimension.

    what: says so, and for which module, in the OptionError for styles and modules that are not known.
    """
    of_rows = {"weight": 0} | ({} if getattr(module, "bias", None) is None else {"bias": 0})
    match module, style:
        case nn.Linear(), ColwiseParallel():
            return of_rows
        case (nn.Linear(), RowwiseParallel()) | (nn.Embedding(), ColwiseParallel()):
            return {"weight": 1}
        case nn.Embedding(), RowwiseParallel():
            return {"weight": 0}
    raise OptionError(
        f"{what} has {type(style).__name__} for a {type(module).__name__}. It takes ColwiseParallel and "
        "RowwiseParallel, for nn.Linear and nn.Embedding."
    )


def _whole_result(module: nn.Module, args: object, result: torch.Tensor) -> torch.Tensor:
    """What a module gives, whole along the last dimension of the mesh."""
    if not isinstance(result, DTensor):
        return result
    return result.redistribute(placements=[*result.placements[:-1], Replicate()])
