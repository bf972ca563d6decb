"""Values that lanes have, whole or in parts: as DTensors, and what one lane has of such."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


def distributed(value: torch.Tensor, mesh: DeviceMesh) -> Any:
    """A DTensor as it is; another tensor is one that all lanes have whole."""
    if isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def share(whole: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """The part of this lane, along a dimension, of a tensor that all lanes have."""
    part: torch.Tensor = distributed(whole, mesh).redistribute(placements=[Shard(dim)]).to_local()
    return part


def joined(part: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> torch.Tensor:
    """The parts of all lanes behind each other along a dimension, or their sum."""
    parts: Any = DTensor.from_local(part, mesh, [placement], run_check=False)
    whole: torch.Tensor = parts.redistribute(placements=[Replicate()]).to_local()
    return whole


def with_summed_gradient(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A tensor that all lanes have, whose gradient is the sum of theirs."""
    same: torch.Tensor = distributed(value, mesh).to_local(grad_placements=[Partial()])
    return same


def exchanged(rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A share of the rows from each lane along the first dimension of the mesh, in their order, for one to
    each."""
    lanes = mesh.size(0)
    shares = [len(rows) // lanes] * lanes
    received: torch.Tensor = functional.all_to_all_single_autograd(
        rows.contiguous(), shares, shares, mesh.get_group(0)
    )
    return received


def in_layout(part: torch.Tensor) -> torch.Tensor:
    """A part of a DTensor, whose gradient has its strides, which torch's DTensors take for granted."""
    result: torch.Tensor = _InLayout.apply(part)  # type: ignore[no-untyped-call]
    return result


class _InLayout(torch.autograd.Function):
    """The value itself; its gradient gets its strides."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.strides = x.stride()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if grad.stride() == ctx.strides:
            return grad
        return torch.empty_strided(grad.shape, ctx.strides, dtype=grad.dtype, device=grad.device).copy_(grad)
