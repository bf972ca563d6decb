"""Attention of values whose tokens lanes divide.

each lane gets all tokens of some of the heads: an exchange of q, k and v, and one of the result
where lanes cannot share the heads: a gather of all k and v

The exchange of heads is that of DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

sdpa: Callable[..., torch.Tensor] = F.scaled_dot_product_attention


def distributed(value: torch.Tensor, mesh: DeviceMesh) -> Any:
    """A DTensor as it is; another tensor is one that all lanes have whole."""
    if isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False)


def attention(
    mesh: DeviceMesh,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention of [rows, heads, tokens, width], where the lanes divide the tokens; else as on one lane."""
    tokens = Shard(query.dim() - 2)
    attend = partial(sdpa, dropout_p=dropout_p, scale=scale)
    q, k, v = (distributed(x, mesh) for x in (query, key, value))
    lanes, mask = mesh.size(), attn_mask
    is_divided = [x.placements == (tokens,) for x in (q, k, v)]
    if not is_divided[0]:
        # All lanes compute the same, and have the same gradients.
        q, k, v = (x.full_tensor() for x in (q, k, v))
        mask = mask.full_tensor() if isinstance(mask, DTensor) else mask
        result = attend(q, k, v, mask, is_causal=is_causal, enable_gqa=enable_gqa)
        alike: torch.Tensor = distributed(result, mesh)
        return alike
    copies = _copies(q.shape[1], k.shape[1], lanes) if all(is_divided) and q.dim() == 4 else 0
    if copies:
        if mask is not None and mask.dim() > 2 and mask.shape[-3] == q.shape[1] > 1:
            mask = distributed(mask, mesh)
            mask = _local(mask, Shard(mask.dim() - 3))
        else:
            mask = _local(mask, Replicate())
        q, k, v = (in_layout(x.to_local()) for x in (q, k, v))
        if copies > 1:
            k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
        result = attend(*_all_tokens([q, k, v], mesh), mask, is_causal=is_causal, enable_gqa=enable_gqa)
        result = _all_heads(result, mesh)
    else:
        k, v = (_whole(x) for x in (k, v))
        if is_causal:
            first = mesh.get_local_rank() * (q.shape[-2] // lanes)
            rows = torch.arange(q.shape[-2] // lanes, device=q.device) + first
            mask = rows.unsqueeze(1) >= torch.arange(k.shape[-2], device=q.device)
        elif mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
            mask = distributed(mask, mesh)
            mask = _local(mask, Shard(mask.dim() - 2))
        else:
            mask = _local(mask, Replicate())
        result = attend(in_layout(q.to_local()), k, v, mask, enable_gqa=enable_gqa)
    divided: torch.Tensor = DTensor.from_local(result, mesh, [tokens], run_check=False)
    return divided


def _local(value: torch.Tensor | None, placement: Placement) -> torch.Tensor | None:
    """The part of a value that a lane uses; its gradient is a part of a sum where all lanes have it whole."""
    if not isinstance(value, DTensor):
        return value
    if placement.is_replicate():
        return _whole(value)
    return value.redistribute(placements=[placement]).to_local()


def _whole(value: DTensor) -> torch.Tensor:
    """A value on all lanes; the gradient on each lane is a part of a sum."""
    mesh, placements = value.device_mesh, value.placements
    if placements[0].is_shard():
        value = DTensor.from_local(in_layout(value.to_local()), mesh, placements, run_check=False)
        return value.full_tensor(grad_placements=[Partial()])
    alike: torch.Tensor = distributed(value.full_tensor(), mesh).to_local(grad_placements=[Partial()])
    return alike


def _copies(heads: int, of_keys: int, lanes: int) -> int:
    """As few copies of each head of keys as let the lanes share all heads evenly; 0 if none do."""
    each, rest = divmod(heads, of_keys)
    if rest or heads % lanes:
        return 0
    return next(n for n in range(1, each + 1) if each % n == 0 and of_keys * n % lanes == 0)


def _all_tokens(parts: Sequence[torch.Tensor], mesh: DeviceMesh) -> list[torch.Tensor]:
    """Of some tokens with all heads, [rows, heads, tokens / lanes, width]: all tokens of some heads."""
    by_lane = [x.unflatten(1, (mesh.size(), -1)).transpose(0, 1) for x in parts]
    heads = [x.shape[2] for x in by_lane]
    if len({x.shape[-1] for x in parts}) == 1:  # one exchange instead of three
        received = _exchanged(torch.cat(by_lane, 2), mesh).split(heads, 2)
    else:
        received = [_exchanged(x, mesh) for x in by_lane]
    return [x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in received]


def _all_heads(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The reverse of ``_all_tokens``."""
    by_lane = x.unflatten(2, (mesh.size(), -1)).permute(2, 0, 1, 3, 4)
    return _exchanged(by_lane, mesh).transpose(0, 1).flatten(1, 2)


def _exchanged(shares: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A share from each lane, for one of the first dimension to each."""
    each = [1] * mesh.size()
    received: torch.Tensor = functional.all_to_all_single_autograd(
        shares.contiguous(), each, each, mesh.get_group()
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
