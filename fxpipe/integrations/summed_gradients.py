"""A style for torch's ``parallelize_module``: modules that run on each lane's share with whole parameters.

before: norm(share) on each lane, whose weight has a part of its gradient on each
after:  the same, and the sum of these parts over the lanes
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from fxpipe.runtime.torch_private import tensors_by_kind


class SummedGradients(ParallelStyle):
    """All lanes hold the module's parameters whole and run it on values of their own, as a norm on the heads
    of a lane; the gradients of the parameters are summed over the lanes."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for owner, name, parameter in parameters_of(module):
            whole = distribute_tensor(
                parameter.data, device_mesh, [Replicate()], src_data_rank=self.src_data_rank
            )
            owner.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))
        forward = module.forward

        def on_parts(*args: Any, **kwargs: Any) -> Any:
            with local_parameters(module, partial_gradients=True):
                return forward(*args, **kwargs)

        module.forward = on_parts
        return module


def parameters_of(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """All parameters below a module, with the module that has them and their name there."""
    owners = module.modules()
    return [(owner, name, p) for owner in owners for name, p in owner.named_parameters(recurse=False)]


@contextlib.contextmanager
def local_parameters(
    module: nn.Module, partial_gradients: bool = False, is_deep: bool = True
) -> Iterator[None]:
    """Within it the parts of this lane stand in the place of the parameters of a module that are DTensors.

    partial_gradients: whether the gradient of a whole parameter is a part of a sum on each lane.
    is_deep: whether those below the module's children are, too.
    """
    before = [each for each in parameters_of(module) if is_deep or each[0] is module]
    placements = [Partial()] if partial_gradients else None
    for owner, name, parameter in before:
        if isinstance(parameter, DTensor):
            local: torch.Tensor = parameter.to_local(grad_placements=placements)
            tensors_by_kind(owner)[0][name] = local
    try:
        yield
    finally:
        for owner, name, parameter in before:
            tensors_by_kind(owner)[0][name] = parameter
