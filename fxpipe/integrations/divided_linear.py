"""Linear layers of DTensors, on the part of each lane as it is.

torch's rule flattens rows and tokens before it multiplies; where lanes divide the tokens of several rows, and
others the columns, it gathers them first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from fxpipe.integrations.divided_attention import distributed, in_layout


def linear(
    mesh: DeviceMesh, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``F.linear``, where each dimension of the mesh divides rows or tokens, or the weight, or neither."""
    x, w = distributed(input, mesh), distributed(weight, mesh)
    last = Shard(x.dim() - 1)
    of_input = [_input(px, pw, last) for px, pw in zip(x.placements, w.placements, strict=True)]
    x = x.redistribute(placements=of_input)
    each = [_along(px, pw, last) for px, pw in zip(of_input, w.placements, strict=True)]
    results, of_x, of_w = (list(column) for column in zip(*each, strict=True))
    parts = in_layout(x.to_local(grad_placements=of_x)), in_layout(w.to_local(grad_placements=of_w))
    b = None if bias is None else distributed(bias, mesh)
    is_sum = any(each.is_partial() for each in results)
    if b is not None and not is_sum:
        b = b.redistribute(placements=[p if p == Shard(0) else Replicate() for p in w.placements])
        b = b.to_local(
            grad_placements=[p if p == Shard(0) else of for p, of in zip(w.placements, of_w, strict=True)]
        )
    product: Any = DTensor.from_local(F.linear(*parts, None if is_sum else b), mesh, results, run_check=False)
    if not is_sum or b is None:
        return product  # type: ignore[no-any-return]
    whole = [Replicate() if each.is_partial() else each for each in results]
    total: torch.Tensor = product.redistribute(placements=whole) + b
    return total


def _input(of_input: Placement, of_weight: Placement, last: Shard) -> Placement:
    """How an input must be distributed along a dimension of the mesh."""
    if of_weight == Shard(1):
        return last
    is_whole = of_weight == Shard(0) or of_input == last or of_input.is_partial()
    return Replicate() if is_whole else of_input


def _along(of_input: Placement, of_weight: Placement, last: Shard) -> tuple[Placement, Placement, Placement]:
    """Along a dimension of the mesh: the result, and the gradients of input and weight."""
    if of_weight == Shard(0):
        return last, Partial(), of_weight
    if of_weight == Shard(1):
        return Partial(), of_input, of_weight
    return of_input, of_input, Replicate() if of_input.is_replicate() else Partial()
