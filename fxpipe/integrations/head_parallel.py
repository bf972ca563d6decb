"""Attention on some heads of each lane, where lanes cannot share a layer's heads evenly: a style for torch's
``parallelize_module``.

before: q, k, v of all heads on every lane; each lane computes all of them
after:  each lane computes some of the heads, copied or zeros where there are too few, and one gather
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode

from fxpipe.errors import OptionError
from fxpipe.integrations.divided_attention import sdpa
from fxpipe.integrations.heads import Heads
from fxpipe.integrations.lane_values import joined, share, with_summed_gradient


class HeadParallel(ParallelStyle):
    """Divides the heads of the ``scaled_dot_product_attention`` calls of a module over the lanes, also where
    their number is no multiple of that of the lanes.

    For a module whose projections give whole results, ``ColwiseParallel(output_layouts=Replicate())``, and
    which ends with ``RowwiseParallel(input_layouts=Replicate())``.

    queries: "whole", where every lane has all heads of the queries, or "divided", where each has its own of
        them, as ``ColwiseParallel()`` gives, and all of the keys and values: for fewer heads of keys than
        lanes.

    Other attention stays whole on all lanes.  Raises OptionError, in the forward, for queries of divided
    heads that do not go with the keys.
    """

    def __init__(self, queries: Literal["whole", "divided"] = "whole"):
        if queries not in ("whole", "divided"):
            raise OptionError(f"queries is 'whole' or 'divided', not {queries!r}.")
        self.queries = queries

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise OptionError(f"HeadParallel is for a mesh of one dimension, not {device_mesh}.")
        module.forward = partial(self._forward, module.forward, device_mesh)
        return module

    def _forward(self, forward: Callable[..., Any], mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
        with _ByHeads(mesh, self.queries == "divided"):
            return forward(*args, **kwargs)


class _ByHeads(TorchFunctionMode):
    def __init__(self, mesh: DeviceMesh, is_divided: bool):
        super().__init__()
        self.mesh, self.is_divided = mesh, is_divided

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is sdpa:
            return _attention(self.mesh, self.is_divided, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    mesh: DeviceMesh,
    is_divided: bool,
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
    """Attention of [rows, heads, tokens, width], of the same keys and values on all lanes."""
    attend = partial(sdpa, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    lanes, keys, mask = mesh.size(), key.shape[-3], attn_mask
    queries = query.shape[-3] * (lanes if is_divided else 1)
    if queries % keys or query.dim() != 4:
        if is_divided:
            raise OptionError(
                f"The queries of {query.shape[-3]} heads on each of {lanes} lanes do not go with keys of "
                f'{keys}. Give HeadParallel(queries="whole") queries of all heads.'
            )
        return attend(query, key, value, mask)
    heads, each = Heads.over(queries, keys, lanes), queries // keys
    if mask is not None and mask.dim() == 4 and mask.shape[1] == queries > 1:
        mask = share(heads.padded(mask, each), mesh, 1)
    elif mask is not None and mask.requires_grad:
        mask = with_summed_gradient(mask, mesh)  # of the heads of a lane
    k, v = (share(heads.copied(x), mesh, 1) for x in (key, value))
    if is_divided:
        return attend(query, k, v, mask)
    result = attend(share(heads.padded(query, each), mesh, 1), k, v, mask)
    return heads.real(joined(result, mesh, Shard(1)), keys, each)
