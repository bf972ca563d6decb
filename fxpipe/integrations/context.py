"""Context parallelism, a style for torch's ``parallelize_module``: each lane has a part of every sequence.

before: model(tokens [rows, length]), all of it on every lane
after:  every lane computes the values of length / lanes tokens, with whole parameters

Values are DTensors that are divided along the sequence, so torch's rules of sharding decide what each op
computes on a lane, which values it needs of others, and how the gradients of parameters are summed; an op
without a rule is refused.  Two functions have rules here:

attention       each lane gets all tokens of some of the heads: an exchange of q, k, v, and one of the result;
                where lanes cannot share the heads: a gather of all k and v
cross-entropy   of a mean, the sum and the count of all lanes (torch takes the mean of the lanes' means)

The ops are torch's: the style also runs in eager, a process for each lane.  The exchange of heads is that of
DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode

from fxpipe.errors import CaptureError, OptionError
from fxpipe.integrations.summed_gradients import parameters_of
from fxpipe.runtime.torch_private import pytree

_F = nn.functional
_sdpa: Callable[..., torch.Tensor] = _F.scaled_dot_product_attention


class ContextParallel(ParallelStyle):
    """Divides the sequences of a module over the lanes; what it returns is whole on all lanes.

    For a whole model with its loss, or a part of it.  All lanes hold its parameters whole, but for those that
    another style has shared out before.

    inputs: the arguments of the forward that are divided, by name, each with the dimension of the sequence
        ({"input_ids": 1}).  Other arguments are whole; what is computed of both is divided.

    Raises OptionError: in ``parallelize_module`` for arguments that the forward does not have, in the forward
    for a sequence that the lanes cannot share evenly.
    """

    def __init__(self, inputs: Mapping[str, int]):
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
        self.inputs = dict(inputs)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise OptionError(
                f"ContextParallel is for a mesh of one dimension, not {device_mesh.mesh_dim_names}."
            )
        forward, signature = module.forward, inspect.signature(module.forward)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        for name in self.inputs.keys() - signature.parameters.keys():
            if not takes_any:
                raise OptionError(
                    f"The forward of a {type(module).__name__} has no argument {name!r}, which "
                    f"ContextParallel is to divide. It has {', '.join(signature.parameters)}."
                )
        made: dict[nn.Parameter, nn.Parameter] = {}  # what is tied stays so
        for owner, name, parameter in parameters_of(module):
            if parameter not in made and not isinstance(parameter, DTensor):
                whole = distribute_tensor(
                    parameter.data, device_mesh, [Replicate()], src_data_rank=self.src_data_rank
                )
                made[parameter] = nn.Parameter(whole, parameter.requires_grad)
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
    if value.shape[dim] % mesh.size():
        raise OptionError(
            f"{name} of shape {tuple(value.shape)} has {value.shape[dim]} tokens in its dimension {dim}, "
            f"which {mesh.size()} lanes cannot share evenly. Pad them to a multiple of {mesh.size()}."
        )
    divided: torch.Tensor = distributed(value, mesh).redistribute(placements=[Shard(dim % value.dim())])
    return divided


class _OnDTensors(TorchFunctionMode):
    """Functions of DTensors take whole tensors of all lanes among them; some have rules of their own."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.mesh = mesh

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs or {}))
        if any(isinstance(x, DTensor) for x in leaves):
            if func in _RULES:
                return _RULES[func](self.mesh, *args, **(kwargs or {}))
            _check_written(func, args, kwargs or {})
            leaves = [distributed(x, self.mesh) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        result = func(*args, **cast(dict[str, Any], kwargs))
        return pytree.tree_map_only(DTensor, _summed, result)


def _summed(value: DTensor) -> torch.Tensor:
    """A value of which lanes have parts of a norm or a maximum, on all of them: in the ops that follow, torch
    takes the parts of a norm for those of a sum."""
    (placement,) = value.placements
    is_linear = type(placement) is Partial and placement.reduce_op in ("sum", "avg")
    if not placement.is_partial() or is_linear:
        return value
    return value.redistribute(placements=[Replicate()])


def _check_written(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise CaptureError for an op that writes what lanes divide to a tensor that they have whole."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or re.fullmatch(r"__i\w+__|\w*[^_]_", name)
    written = args[0] if in_place and args else kwargs.get("out")
    if isinstance(written, torch.Tensor) and not isinstance(written, DTensor):
        raise CaptureError(
            f"{name} writes what lanes divide to a tensor of shape {tuple(written.shape)} that each of them "
            "has whole. Make that tensor from a divided one: torch.zeros_like(x), x.new_zeros(…)."
        )


def distributed(value: torch.Tensor, mesh: DeviceMesh) -> Any:
    """A DTensor as it is; another tensor is one that all lanes have whole."""
    if isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False)


def _mean_of_all(
    loss: Callable[..., torch.Tensor], mesh: DeviceMesh, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """A loss that is a mean over the labels that count, of which lanes may have different numbers."""
    bound = inspect.signature(loss).bind(*args, **kwargs)
    bound.apply_defaults()
    by_name: dict[str, Any] = bound.arguments
    for name in ("target", "weight"):
        by_name[name] = None if by_name[name] is None else distributed(by_name[name], mesh)
    labels, weight, older = by_name["target"], by_name["weight"], (by_name["size_average"], by_name["reduce"])
    if by_name["reduction"] != "mean" or older != (None, None) or labels.is_floating_point():
        return loss(*bound.args, **bound.kwargs)
    logits, by_name["reduction"] = by_name["input"], "sum"
    if isinstance(logits, DTensor) and getattr(logits.placements[0], "dim", None) == 0:
        # The labels of its rows: moved here once, and not in the backward again. A sum knows no order of
        # rows, and torch 2.14 has no rule for the order that it gives to labels here.
        rows = [labels.redistribute(placements=logits.placements), logits]
        by_name["target"], by_name["input"] = (
            DTensor.from_local(x.to_local(), mesh, [Shard(0)], run_check=False) for x in rows
        )
    total: Any = loss(*bound.args, **bound.kwargs)
    counted = labels != by_name["ignore_index"]
    count = (counted if weight is None else weight[labels * counted] * counted).sum()
    mean: torch.Tensor = total.redistribute(placements=[Replicate()]) / count.redistribute(
        placements=[Replicate()]
    )
    return mean


def _mean_of_elements(
    loss: Callable[..., torch.Tensor], mesh: DeviceMesh, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """A loss that is a mean over elements: torch's gradients of a lane's are those of its own mean alone."""
    bound = inspect.signature(loss).bind(*args, **kwargs)
    bound.apply_defaults()
    by_name: dict[str, Any] = bound.arguments
    for name, value in by_name.items():
        by_name[name] = distributed(value, mesh) if isinstance(value, torch.Tensor) else value
    older = by_name.get("size_average"), by_name.get("reduce")
    if by_name["reduction"] != "mean" or older != (None, None) or by_name.get("weight") is not None:
        return loss(*bound.args, **bound.kwargs)
    by_name["reduction"] = "none"
    return loss(*bound.args, **bound.kwargs).mean()


def _attention(
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
    attend = partial(_sdpa, dropout_p=dropout_p, scale=scale)
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
        q, k, v = (_in_layout(x.to_local()) for x in (q, k, v))
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
        result = attend(_in_layout(q.to_local()), k, v, mask, enable_gqa=enable_gqa)
    divided: torch.Tensor = DTensor.from_local(result, mesh, [tokens], run_check=False)
    return divided


def _concatenated(
    mesh: DeviceMesh, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Without empty tensors of one dimension, as caches begin with, which are nothing to torch."""
    parts = [x for x in tensors if x.shape != (0,)] or tensors[:1]
    first, *others = (distributed(x, mesh) for x in parts)
    return torch.cat([first, *others], *args, **kwargs) if others else first.clone()


def _scattered(mesh: DeviceMesh, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In place, which torch has no rule for where lanes divide the rows."""
    _check_written(torch.Tensor.scatter_, (value,), {})
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
    by_lane = value.placements[0] if isinstance(value, DTensor) else Replicate()
    divided, dim = getattr(by_lane, "dim", None), dim % value.dim()
    if divided is None or divided == dim:
        return of(value, k, dim, *args, **kwargs)
    if (rows := getattr(by_lane, "split_factor", 1)) > 1:  # flattened; lanes divide the tokens of each row
        apart = value.unflatten(divided, (rows, -1))
        found = _largest(of, mesh, apart, k, dim + (divided < dim), *args, **kwargs)
        return _pair(x.flatten(divided, divided + 1) for x in found)
    local: Any = value
    found = of(_in_layout(local.to_local()), k, dim, *args, **kwargs)
    return _pair(DTensor.from_local(x, mesh, [by_lane], run_check=False) for x in found)


def _pair(results: Iterable[torch.Tensor]) -> torch.return_types.topk:
    values, indices = results
    return torch.return_types.topk((values, indices))


#: Losses that are a mean over all of their elements.
_MEANS = (
    _F.binary_cross_entropy, _F.binary_cross_entropy_with_logits, _F.gaussian_nll_loss, _F.huber_loss,
    _F.kl_div, _F.l1_loss, _F.mse_loss, _F.poisson_nll_loss, _F.smooth_l1_loss, _F.soft_margin_loss,
)  # fmt: skip
_PIECES = "chunk", "split", "tensor_split", "unbind"
_CUTS = [getattr(x, name) for x in (torch, torch.Tensor) for name in _PIECES]
#: function -> what it is of DTensors
_RULES: dict[object, Callable[..., Any]] = {
    **{cut: partial(_in_pieces, cut) for cut in _CUTS},
    _sdpa: _attention,
    torch.cat: _concatenated,
    torch.Tensor.scatter_: _scattered,
    **{loss: partial(_mean_of_elements, loss) for loss in _MEANS},
    **{of: partial(_largest, of) for of in (torch.topk, torch.Tensor.topk)},
    **{loss: partial(_mean_of_all, loss) for loss in (_F.cross_entropy, _F.nll_loss)},
}


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
        value = DTensor.from_local(_in_layout(value.to_local()), mesh, placements, run_check=False)
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


def _in_layout(part: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _InLayout.apply(part)  # type: ignore[no-untyped-call]
    return result


class _InLayout(torch.autograd.Function):
    """The value itself; its gradient gets its strides, which torch's DTensors take for granted."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.strides = x.stride()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if grad.stride() == ctx.strides:
            return grad
        return torch.empty_strided(grad.shape, ctx.strides, dtype=grad.dtype, device=grad.device).copy_(grad)
