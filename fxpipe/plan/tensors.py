"""The memory layout of a tensor: the bytes that it spans, whether it fills them, its strides; and its dtype,
if it is a gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def storage_bytes(tensor: torch.Tensor) -> int:
    """The bytes that the elements of a tensor span in memory (an expanded dimension adds none)."""
    if tensor.is_contiguous():  # the usual case, and frequent
        return tensor.numel() * tensor.element_size()
    # Strides of no elements span nothing.
    if tensor.numel() == 0:
        return 0
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return span * tensor.element_size()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a block of memory without holes or overlap, in any order of dimensions."""
    is_all = storage_bytes(tensor) == tensor.numel() * tensor.element_size()
    return is_all and is_packed(tensor.shape, tensor.stride())


def is_packed(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements with these strides have no holes between them and no overlap."""
    # From the narrowest stride on, each is as wide as all before it together.
    dims = sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1)
    sizes = [n for _, n in dims]
    return all(s == math.prod(sizes[:i]) for i, (s, _) in enumerate(dims))


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an element of one tensor is one of the other, too; of other sizes, whether it may be."""
    begin, size = min(a.data_ptr(), b.data_ptr()), a.element_size()
    ends = [x.data_ptr() + storage_bytes(x) for x in (a, b)]
    # Blocks that do not meet share nothing, and meta tensors have no memory.
    if a.is_meta or a.device != b.device or max(a.data_ptr(), b.data_ptr()) >= min(ends):
        return False
    # Elements that lie across each other cannot be marked one by one.
    if b.element_size() != size or (a.data_ptr() - b.data_ptr()) % size:
        return True
    # A mark for each element of both blocks: strides may interleave without a common element.
    memory = torch.zeros((max(ends) - begin) // size, dtype=torch.bool, device="cpu")
    first, second = (memory.as_strided(x.shape, x.stride(), (x.data_ptr() - begin) // size) for x in (a, b))
    first.fill_(True)
    return bool(second.any())


def gradient_dtype(parameter: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in which a parameter's gradient is accumulated: the one that was asked for, if the
    parameter's has fewer bits (a complex parameter's gets its parts in that dtype)."""
    return parameter if wanted is None else torch.promote_types(parameter, wanted)


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over the vocabulary."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def sum_over_ranks(*parts: torch.Tensor) -> torch.Tensor:
    """The sum of the parts of all ranks, added in rank order, in single precision at least.

    In a graph it is no op of a section: the section that uses it gets the sum as an input, and the other
    sections give the parts.
    """
    # A copy, as the part itself may be sent, or saved.
    total = parts[0].to(accum_dtype(parts[0].dtype), copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(parts[0].dtype)


def in_strides(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides, copied if its own differ."""
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def dtype_of(name: str) -> Any:
    """The dtype named as ``"torch.float32"``; None if there is no such dtype."""
    dtype = getattr(torch, name.removeprefix("torch."), None) if name.startswith("torch.") else None
    return dtype if isinstance(dtype, torch.dtype) else None
