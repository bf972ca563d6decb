"""Refuses operands of several dtypes where kernels take one: fake tensors do not look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxpipe.errors import CaptureError
from fxpipe.ir.compat import OpOverload, pytree


def _ops(names: str) -> set[OpOverload]:
    return {getattr(torch.ops.aten, name).default for name in names.split()}


#: All of whose tensors have one dtype.
_PRODUCTS = _ops("addbmm addmm addmv baddbmm bmm dot mm mv vdot")
_LOSSES = _ops("nll_loss_forward nll_loss2d_forward")
#: All of whose tensors of real and complex numbers have one dtype.
_ALIKE = _LOSSES | _ops(
    "_cdist_forward _embedding_bag _embedding_bag_forward_only binary_cross_entropy complex grid_sampler_2d "
    "grid_sampler_3d heaviside index_add index_add_ index_copy index_copy_ index_put index_put_ index_reduce "
    "index_reduce_ linalg_cross polar put put_"
)
#: float64 is not mixed with others; statistics of float32 are mixed with data of fewer bits.
_NORMS = _ops("_native_batch_norm_legit native_batch_norm native_group_norm native_layer_norm")
_KNOWN = _PRODUCTS | _ALIKE | _NORMS


def check_dtypes(func: object, args: Any, place: Callable[[], str]) -> None:
    """Raise CaptureError, naming the place, for an op whose kernel does not take these dtypes."""
    if func not in _KNOWN:
        return
    if func in _LOSSES and args[1].dtype not in (torch.int64, torch.uint8):
        raise CaptureError(
            f"The classes of a loss are of {args[1].dtype}, at {place()}, which its kernel does not take. "
            "Give them as torch.int64."
        )
    tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
    if func not in _PRODUCTS:
        tensors = [x for x in tensors if x.is_floating_point() or x.is_complex()]
    dtypes = list(dict.fromkeys(x.dtype for x in tensors))
    if len(dtypes) < 2 or (func in _NORMS and torch.float64 not in dtypes):
        return
    raise CaptureError(
        f"{func} gets tensors of {' and of '.join(map(str, dtypes))}, at {place()}, which its kernel does "
        "not take. Give an example and batches of the model's dtype, or convert one of the operands there."
    )
