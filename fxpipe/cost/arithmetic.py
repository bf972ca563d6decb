"""The arithmetic of an op, by which a device's FLOPs a second are listed.

``float64``, ``float32``, ``tf32`` (float32 rounded for tensor cores), ``bfloat16``, ``float16``, ``float8``.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.storage import tensors

_FLOAT8 = {
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "float8" in str(dtype)
}


def arithmetic_of(node: fx.Node) -> str:
    """The arithmetic of a matrix product, a convolution or attention: of its smallest floating-point input,
    as results and scales may be wider.

    float32 follows torch's current settings of TF32, which differ for matrix products and convolutions.
    """
    read = [t.dtype for n in node.all_input_nodes for t in tensors(n)] or [t.dtype for t in tensors(node)]
    floats = [dtype for dtype in read if dtype.is_floating_point]
    dtype = min(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)
    if dtype in _FLOAT8:
        return "float8"
    if dtype is torch.float32 and uses_tf32(convolution="convolution" in str(node.target)):
        return "tf32"
    return str(dtype).removeprefix("torch.")


def uses_tf32(*, convolution: bool) -> bool:
    """Whether torch is set to compute float32 products (or convolutions) in TF32 where a GPU has it."""
    # Not ``allow_tf32``: to read it is an error where the newer setting was written.
    of_convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    setting = of_convolutions if convolution else torch.backends.cuda.matmul
    return bool(setting.fp32_precision == "tf32")
