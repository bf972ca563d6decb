"""Attention of values whose tokens the lanes along the first dimension of a mesh divide.

each lane gets all tokens of some of the heads: an exchange of q, k and v, and one of the result
where lanes cannot share the heads evenly: of heads of zeros too, or a gather of all k and v

Along other dimensions lanes may share out the heads.

The exchange of heads is that of DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from fxpipe.integrations.heads import Heads
from fxpipe.integrations.lane_values import distributed, exchanged, in_layout

sdpa: Callable[..., torch.Tensor] = F.scaled_dot_product_attention


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
    tokens, mask = Shard(query.dim() - 2), attn_mask
    attend = partial(sdpa, dropout_p=dropout_p, scale=scale)
    q, k, v = (distributed(x, mesh) for x in (query, key, value))
    lanes, is_divided = mesh.size(0), [x.placements[0] == tokens for x in (q, k, v)]
    has_heads = mask is not None and mask.dim() > 2 and mask.shape[-3] == q.shape[-3] > 1
    shared = (
        _shared_heads(q, k, v, mesh) if is_divided[0] and not has_heads else [Replicate()] * (mesh.ndim - 1)
    )
    if not is_divided[0]:
        # All lanes compute the same, and have the same gradients.
        q, k, v = (x.full_tensor() for x in (q, k, v))
        mask = mask.full_tensor() if isinstance(mask, DTensor) else mask
        result = attend(q, k, v, mask, is_causal=is_causal, enable_gqa=enable_gqa)
        alike: torch.Tensor = distributed(result, mesh)
        return alike
    q, k, v = (
        x.redistribute(placements=[tokens if along else Replicate(), *shared])
        for x, along in zip((q, k, v), is_divided, strict=True)
    )
    of_queries, of_keys = (x.to_local().shape[1] for x in (q, k))
    heads = None
    if all(is_divided) and q.dim() == 4 and not of_queries % of_keys:
        heads = Heads.over(of_queries, of_keys, lanes)
        # Heads of zeros cost as real ones, and a gather twice as much as a causal kernel.
        if heads.number > (2 * of_queries if is_causal else of_queries):
            heads = None
    if heads is not None:
        if mask is not None and has_heads:
            mask = _local(distributed(mask, mesh), Shard(mask.dim() - 3), shared)
        else:
            mask = _local(mask, Replicate(), shared)
        q, k, v = (in_layout(x.to_local()) for x in (q, k, v))
        each = of_queries // of_keys
        q, k, v = heads.padded(q, each), heads.copied(k), heads.copied(v)
        result = attend(*_all_tokens([q, k, v], mesh), mask, is_causal=is_causal, enable_gqa=enable_gqa)
        result = heads.real(_all_heads(result, mesh), of_keys, each)
    else:
        k, v = (_whole(x, shared, shared) for x in (k, v))
        if is_causal:
            first = mesh.get_local_rank(0) * (q.shape[-2] // lanes)
            rows = torch.arange(q.shape[-2] // lanes, device=q.device) + first
            mask = rows.unsqueeze(1) >= torch.arange(k.shape[-2], device=q.device)
        elif mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
            mask = _local(distributed(mask, mesh), Shard(mask.dim() - 2), shared)
        else:
            mask = _local(mask, Replicate(), shared)
        result = attend(in_layout(q.to_local()), k, v, mask, enable_gqa=enable_gqa)
    divided: torch.Tensor = DTensor.from_local(result, mesh, [tokens, *shared], run_check=False)
    return divided


def _shared_heads(q: DTensor, k: DTensor, v: DTensor, mesh: DeviceMesh) -> list[Placement]:
    """How lanes along other dimensions share out the heads of all three, where they do."""
    heads = Shard(q.dim() - 3)
    return [
        heads if of_q == heads and not any(x.shape[-3] % number for x in (q, k, v)) else Replicate()
        for of_q, number in zip(q.placements[1:], mesh.shape[1:], strict=True)
    ]


def _local(
    value: torch.Tensor | None, placement: Placement, shared: Sequence[Placement]
) -> torch.Tensor | None:
    """The part of a mask that a lane uses; its gradient is a part of a sum where lanes use the same for other
    tokens or heads."""
    if not isinstance(value, DTensor):
        return value
    alike = [Replicate()] * len(shared)
    of_heads = [Partial() if each.is_shard() else each for each in shared]
    if placement.is_replicate():
        return _whole(value, alike, of_heads)
    return value.redistribute(placements=[placement, *alike]).to_local(grad_placements=[placement, *of_heads])


def _whole(value: DTensor, shared: Sequence[Placement], gradients: Sequence[Placement]) -> torch.Tensor:
    """A value on all lanes along the first dimension, where the gradient of each is a part of a sum; along
    the others it is ``shared`` as its gradient."""
    mesh, placements = value.device_mesh, value.placements
    if placements[0].is_shard():
        value = DTensor.from_local(in_layout(value.to_local()), mesh, placements, run_check=False)
    alike: Any = value.redistribute(placements=[Replicate(), *shared])
    return alike.to_local(grad_placements=[Partial(), *gradients])  # type: ignore[no-any-return]


def _all_tokens(parts: Sequence[torch.Tensor], mesh: DeviceMesh) -> list[torch.Tensor]:
    """Make all tokens of some heads from some tokens with all, [rows, heads, tokens / lanes, width]."""
    by_lane = [x.unflatten(1, (mesh.size(0), -1)).transpose(0, 1) for x in parts]
    heads = [x.shape[2] for x in by_lane]
    if len({x.shape[-1] for x in parts}) == 1:  # one exchange instead of three
        received = exchanged(torch.cat(by_lane, 2), mesh).split(heads, 2)
    else:
        received = [exchanged(x, mesh) for x in by_lane]
    return [x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in received]


def _all_heads(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The reverse of ``_all_tokens``."""
    by_lane = x.unflatten(2, (mesh.size(0), -1)).permute(2, 0, 1, 3, 4)
    return exchanged(by_lane, mesh).transpose(0, 1).flatten(1, 2)
