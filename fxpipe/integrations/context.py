"""Context parallelism, a style for torch's ``parallelize_module``: each lane has a part of every sequence.

before: model(tokens [rows, length]), all of it on every lane
after:  every lane computes the values of length / lanes tokens, with whole parameters; with a mesh of two
        dimensions the lanes along the second have a part of some of them each

Values are DTensors that are divided along the sequence, so torch's rules of sharding decide what each op
computes on a lane, which values it needs of others, and how the gradients of parameters are summed; an op
without a rule is refused.  Some have rules in ``divided_attention.py`` and ``divided_functions.py``.

The ops are torch's: the style also runs in eager, a process for each lane.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode

from fxpipe.errors import OptionError
from fxpipe.integrations.divided_functions import RULES, check_written
from fxpipe.integrations.lane_values import distributed
from fxpipe.integrations.summed_gradients import parameters_of
from fxpipe.integrations.tensor_plan import share_out
from fxpipe.runtime.torch_private import pytree


class ContextParallel(ParallelStyle):
    """Divides the sequences of a module over the lanes; what it returns is whole on all lanes.

    For a whole model with its loss, or a part of it.  All lanes hold its parameters whole, but for those that
    another style has shared out before.

    inputs: the arguments of the forward that are divided, by name, each with the dimension of the sequence
        ({"input_ids": 1}).  Other arguments are whole; what is computed of both is divided.
    tensor: where the mesh has a second dimension, the plan of tensor parallelism along it: module, as a
        pattern of ``parallelize_module`` -> ``ColwiseParallel()`` or ``RowwiseParallel()``, of whose layouts
        only ``output_layouts=Replicate()`` counts: values stay DTensors between modules.

    Raises OptionError: in ``parallelize_module`` for arguments that the forward does not have and plans that
    mean nothing here, in the forward for a sequence that the lanes cannot share evenly.
    """

    def __init__(self, inputs: Mapping[str, int], tensor: Mapping[str, ParallelStyle] | None = None):
        if torch.__version__ < "2.12":
            raise OptionError(
                f"ContextParallel needs torch 2.12 or newer, and this is {torch.__version__}, whose DTensors "
                "do not flatten rows and tokens that lanes divide: pip install -U torch."
            )
        if not isinstance(inputs, Mapping) or not inputs or not all(type(d) is int for d in inputs.values()):
            raise OptionError(
                "inputs are the arguments of the forward that lanes divide, each with the dimension of the "
                f"sequence, as in {{'input_ids': 1}}, not {inputs!r}."
            )
        self.inputs, self.tensor = dict(inputs), dict(tensor or {})

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1 + bool(self.tensor):
            raise OptionError(
                "ContextParallel is for a mesh of one dimension, or of two with tensor=, the plan along the "
                f"second, not {device_mesh.mesh_dim_names} with tensor={self.tensor}."
            )
        forward, signature = module.forward, inspect.signature(module.forward)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        for name in self.inputs.keys() - signature.parameters.keys():
            if not takes_any:
                raise OptionError(
                    f"The forward of a {type(module).__name__} has no argument {name!r}, which "
                    f"ContextParallel is to divide. It has {', '.join(signature.parameters)}."
                )
        shared = share_out(module, self.tensor, device_mesh)
        made: dict[nn.Parameter, nn.Parameter] = {}  # what is tied stays so
        for owner, name, parameter in parameters_of(module):
            if parameter not in made and not isinstance(parameter, DTensor):
                placements = [Replicate(), shared.get(parameter, Replicate())][: device_mesh.ndim]
                placed = distribute_tensor(
                    parameter.data, device_mesh, placements, src_data_rank=self.src_data_rank
                )
                made[parameter] = nn.Parameter(placed, parameter.requires_grad)
            owner.register_parameter(name, made.get(parameter, parameter))
        module.forward = partial(self._forward, forward, signature, device_mesh)
        return module

    def _forward(
        self,
        forward: Callable[..., Any],
        signature: inspect.Signature,
        mesh: DeviceMesh,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        bound = signature.bind(*args, **kwargs)
        by_name: dict[str, Any] = bound.arguments
        for name, dim in self.inputs.items():
            where = by_name if name in by_name else bound.kwargs
            if isinstance(value := where.get(name), torch.Tensor):
                divided = _divided(name, value, dim, mesh)
                if name in by_name:
                    by_name[name] = divided
                else:
                    by_name[_rest(signature)][name] = divided
        with _OnDTensors(mesh):
            result = forward(*bound.args, **bound.kwargs)
        return pytree.tree_map_only(DTensor, DTensor.full_tensor, result)


def _rest(signature: inspect.Signature) -> str:
    """The name of the argument that takes all others by name."""
    return next(name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD)


def _divided(name: str, value: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """An argument that every lane has whole, or a part of, divided along a dimension."""
    if not -value.dim() <= dim < value.dim():
        raise OptionError(f"{name} of shape {tuple(value.shape)} has no dimension {dim} that lanes divide.")
    if value.shape[dim] % mesh.size(0):
        raise OptionError(
            f"{name} of shape {tuple(value.shape)} has {value.shape[dim]} tokens in its dimension {dim}, "
            f"which {mesh.size(0)} lanes cannot share evenly. Pad them to a multiple of {mesh.size(0)}."
        )
    placements = [Shard(dim % value.dim()), Replicate()][: mesh.ndim]
    divided: torch.Tensor = distributed(value, mesh).redistribute(placements=placements)
    return divided


class _OnDTensors(TorchFunctionMode):
    """Functions of DTensors take whole tensors of all lanes among them; some have rules of their own."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.mesh = mesh

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs or {}))
        if any(isinstance(x, DTensor) for x in leaves):
            if func in RULES:
                return RULES[func](self.mesh, *args, **(kwargs or {}))
            check_written(func, args, kwargs or {})
            leaves = [distributed(x, self.mesh) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        result = func(*args, **kwargs)
        return pytree.tree_map_only(DTensor, _summed, result)


def _summed(value: DTensor) -> torch.Tensor:
    """A value of which lanes have parts of a norm or a maximum, on all of them: in the ops that follow, torch
    takes the parts of a norm for those of a sum."""
    placements = [Replicate() if _is_no_sum(each) else each for each in value.placements]
    return value if placements == [*value.placements] else value.redistribute(placements=placements)


def _is_no_sum(placement: Placement) -> bool:
    is_linear = type(placement) is Partial and placement.reduce_op in ("sum", "avg")
    return placement.is_partial() and not is_linear
