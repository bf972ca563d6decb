"""Refuses operands of several dtypes where kernels take one: fake tensors do not look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxpipe.errors import CaptureError
from fxpipe.ir.compat import pytree

aten = torch.ops.aten

#: All of whose tensors have one dtype.
_PRODUCTS = {
    aten.addbmm.default,
    aten.addmm.default,
    aten.addmv.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.dot.default,
    aten.mm.default,
    aten.mv.default,
    aten.vdot.default,
}
#: All of whose tensors of real and complex numbers have one dtype.
_ALIKE = {
    aten._cdist_forward.default,
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    aten.binary_cross_entropy.default,
    aten.complex.default,
    aten.grid_sampler_2d.default,
    aten.grid_sampler_3d.default,
    aten.heaviside.default,
    aten.index_add.default,
    aten.index_add_.default,
    aten.index_copy.default,
    aten.index_copy_.default,
    aten.index_put.default,
    aten.index_put_.default,
    aten.index_reduce.default,
    aten.index_reduce_.default,
    aten.linalg_cross.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    aten.polar.default,
    aten.put.default,
    aten.put_.default,
}
#: float64 is not mixed with others; statistics of float32 are mixed with data of fewer bits.
_NORMS = {
    aten._native_batch_norm_legit.default,
    aten.native_batch_norm.default,
    aten.native_group_norm.default,
    aten.native_layer_norm.default,
}


_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
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
