"""Functions of DTensors that lanes divide, where torch has no rule, or one that gives other numbers.

cross-entropy   of a mean, the sum and the count of all lanes (torch takes the mean of the lanes' means)
other means     an op of its own (torch's gradient of the op is that of the lane's own mean)
pieces          the gradient of one that nobody reads is zero
linear          on the part of each lane as it is
topk, scatter_, cat
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, zeros

from fxpipe.errors import CaptureError
from fxpipe.integrations.divided_attention import attention, sdpa
from fxpipe.integrations.lane_values import distributed, in_layout
from fxpipe.runtime.torch_private import pytree

_F = nn.functional


def check_written(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise CaptureError for an op that writes what lanes divide to a tensor that they have whole."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or re.fullmatch(r"__i\w+__|\w*[^_]_", name)
    written = args[0] if in_place and args else kwargs.get("out")
    if isinstance(written, torch.Tensor) and not isinstance(written, DTensor):
        raise CaptureError(
            f"{name} writes what lanes divide to a tensor of shape {tuple(written.shape)} that each of them "
            "has whole. Make that tensor from a divided one: torch.zeros_like(x), x.new_zeros(…)."
        )


def _bound(
    loss: Callable[..., torch.Tensor], mesh: DeviceMesh, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[inspect.BoundArguments, bool]:
    """The arguments of a loss, all tensors as DTensors; and whether it is a mean."""
    bound = inspect.signature(loss).bind(*args, **kwargs)
    bound.apply_defaults()
    by_name: dict[str, Any] = bound.arguments
    for name, value in by_name.items():
        by_name[name] = distributed(value, mesh) if isinstance(value, torch.Tensor) else value
    older = by_name.get("size_average"), by_name.get("reduce")
    return bound, by_name["reduction"] == "mean" and older == (None, None)


def _mean_of_all(
    loss: Callable[..., torch.Tensor], mesh: DeviceMesh, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """A loss that is a mean over the labels that count, of which lanes may have different numbers."""
    bound, is_mean = _bound(loss, mesh, args, kwargs)
    by_name: dict[str, Any] = bound.arguments
    labels, weight = by_name["target"], by_name["weight"]
    if not is_mean or labels.is_floating_point():
        return loss(*bound.args, **bound.kwargs)
    logits, by_name["reduction"] = by_name["input"], "sum"
    whole = [Replicate()] * mesh.ndim
    by_lane = [logits.placements[0], *whole[1:]]  # no lane has but a part of a word's logits
    by_name["input"] = logits = logits.redistribute(placements=by_lane)
    if getattr(by_lane[0], "dim", None) == 0:
        # The labels of its rows: moved here once, and not in the backward again. A sum knows no order of
        # rows, and torch 2.14 has no rule for the order that it gives to labels here.
        rows = [labels.redistribute(placements=by_lane), logits]
        by_name["target"], by_name["input"] = (
            DTensor.from_local(x.to_local(), mesh, [Shard(0), *whole[1:]], run_check=False) for x in rows
        )
    total: Any = loss(*bound.args, **bound.kwargs)
    counted = labels != by_name["ignore_index"]
    count = (counted if weight is None else weight[labels * counted] * counted).sum()
    mean: torch.Tensor = total.redistribute(placements=whole) / count.redistribute(placements=whole)
    return mean


def _mean_of_elements(
    loss: Callable[..., torch.Tensor], mesh: DeviceMesh, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """A loss that is a mean over elements: torch's gradients of a lane's are those of its own mean alone."""
    bound, is_mean = _bound(loss, mesh, args, kwargs)
    if not is_mean or bound.arguments.get("weight") is not None:
        return loss(*bound.args, **bound.kwargs)
    bound.arguments["reduction"] = "none"
    return loss(*bound.args, **bound.kwargs).mean()


def _concatenated(
    mesh: DeviceMesh, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Concatenate without empty tensors of one dimension, as caches begin with: they are nothing to torch."""
    parts = [x for x in tensors if x.shape != (0,)] or tensors[:1]
    first, *others = (distributed(x, mesh) for x in parts)
    return torch.cat([first, *others], *args, **kwargs) if others else first.clone()


def _scattered(mesh: DeviceMesh, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In place, which torch has no rule for where lanes divide the rows."""
    check_written(torch.Tensor.scatter_, (value,), {})
    args, kwargs = pytree.tree_map_only(torch.Tensor, partial(distributed, mesh=mesh), (args, kwargs))
    return value.copy_(value.scatter(*args, **kwargs))


def _in_pieces(
    cut: Callable[..., Sequence[torch.Tensor]],
    mesh: DeviceMesh,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Sequence[torch.Tensor]:
    """The gradient of a piece that nobody reads is a DTensor of zeros; autograd's own is none."""
    pieces = cut(value, *args, **kwargs)
    return _Read.apply(*pieces) if isinstance(value, DTensor) else pieces  # type: ignore[no-untyped-call]


class _Read(torch.autograd.Function):
    """The values themselves; where one is not read its gradient is zero, as DTensors have it."""

    @staticmethod
    def forward(ctx: Any, *values: DTensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layouts = [(x.device_mesh, x.placements, x.shape, x.dtype) for x in values]
        return tuple(x.view_as(x) for x in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return tuple(
            zeros(shape, dtype=dtype, device_mesh=mesh, placements=placements) if grad is None else grad
            for grad, (mesh, placements, shape, dtype) in zip(grads, ctx.layouts, strict=True)
        )


def _largest(
    of: Callable[..., torch.return_types.topk],
    mesh: DeviceMesh,
    value: torch.Tensor,
    k: int,
    dim: int = -1,
    *args: Any,
    **kwargs: Any,
) -> Sequence[torch.Tensor]:
    """The largest values along a dimension that lanes do not divide: each lane finds those of its part.

    Torch gathers the values, from 2.14 on their gradients.
    """
    by_lane, *others = value.placements if isinstance(value, DTensor) else [Replicate()]
    divided, dim = getattr(by_lane, "dim", None), dim % value.dim()
    if divided is None or divided == dim or not all(each.is_replicate() for each in others):
        return of(value, k, dim, *args, **kwargs)
    if (rows := getattr(by_lane, "split_factor", 1)) > 1:  # flattened; lanes divide the tokens of each row
        apart = value.unflatten(divided, (rows, -1))
        largest = _largest(of, mesh, apart, k, dim + (divided < dim), *args, **kwargs)
        return _pair(x.flatten(divided, divided + 1) for x in largest)
    local: Any = value
    largest = of(in_layout(local.to_local()), k, dim, *args, **kwargs)
    return _pair(DTensor.from_local(x, mesh, [by_lane, *others], run_check=False) for x in largest)


def _pair(results: Iterable[torch.Tensor]) -> torch.return_types.topk:
    values, indices = results
    return torch.return_types.topk((values, indices))


def _linear(
    mesh: DeviceMesh, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``F.linear``, where each dimension of the mesh divides rows or tokens, or the weight, or neither; on
    the part of each lane as it is.

    torch's rule flattens rows and tokens before it multiplies; where lanes divide the tokens of several rows,
    and others the columns, it gathers them first.
    """
    x, w = distributed(input, mesh), distributed(weight, mesh)
    last = Shard(x.dim() - 1)
    of_input = [_input_of_linear(px, pw, last) for px, pw in zip(x.placements, w.placements, strict=True)]
    x = x.redistribute(placements=of_input)
    each = [_along_linear(px, pw, last) for px, pw in zip(of_input, w.placements, strict=True)]
    results, of_x, of_w = (list(column) for column in zip(*each, strict=True))
    parts = in_layout(x.to_local(grad_placements=of_x)), in_layout(w.to_local(grad_placements=of_w))
    b = None if bias is None else distributed(bias, mesh)
    is_sum = any(each.is_partial() for each in results)
    if b is not None and not is_sum:
        b = b.redistribute(placements=[p if p == Shard(0) else Replicate() for p in w.placements])
        b = b.to_local(
            grad_placements=[p if p == Shard(0) else of for p, of in zip(w.placements, of_w, strict=True)]
        )
    product: Any = DTensor.from_local(
        _F.linear(*parts, None if is_sum else b), mesh, results, run_check=False
    )
    if not is_sum or b is None:
        return product  # type: ignore[no-any-return]
    whole = [Replicate() if each.is_partial() else each for each in results]
    total: torch.Tensor = product.redistribute(placements=whole) + b
    return total


def _input_of_linear(of_input: Placement, of_weight: Placement, last: Shard) -> Placement:
    """How an input must be distributed along a dimension of the mesh."""
    if of_weight == Shard(1):
        return last
    is_whole = of_weight == Shard(0) or of_input == last or of_input.is_partial()
    return Replicate() if is_whole else of_input


def _along_linear(
    of_input: Placement, of_weight: Placement, last: Shard
) -> tuple[Placement, Placement, Placement]:
    """Along a dimension of the mesh: the result, and the gradients of input and weight."""
    if of_weight == Shard(0):
        return last, Partial(), of_weight
    if of_weight == Shard(1):
        return Partial(), of_input, of_weight
    return of_input, of_input, Replicate() if of_input.is_replicate() else Partial()


#: Losses that are a mean over all of their elements.
_MEANS = (
    _F.binary_cross_entropy, _F.binary_cross_entropy_with_logits, _F.gaussian_nll_loss, _F.huber_loss,
    _F.kl_div, _F.l1_loss, _F.mse_loss, _F.poisson_nll_loss, _F.smooth_l1_loss, _F.soft_margin_loss,
)  # fmt: skip
_PIECES = "chunk", "split", "tensor_split", "unbind"
_CUTS = [getattr(x, name) for x in (torch, torch.Tensor) for name in _PIECES]
#: function -> what it is of DTensors
RULES: dict[object, Callable[..., Any]] = {
    **{cut: partial(_in_pieces, cut) for cut in _CUTS},
    sdpa: attention,
    _F.linear: _linear,
    torch.cat: _concatenated,
    torch.Tensor.scatter_: _scattered,
    **{loss: partial(_mean_of_elements, loss) for loss in _MEANS},
    **{of: partial(_largest, of) for of in (torch.topk, torch.Tensor.topk)},
    **{loss: partial(_mean_of_all, loss) for loss in (_F.cross_entropy, _F.nll_loss)},
}
