"""A number that tells tensors apart: cheap, and without a wait for the device."""

from __future__ import annotations

from functools import cache

import torch

from fxpipe.plan.number import number

#: Elements of a tensor that count, at least one of each row.
MOST = 1 << 13

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-d int64 tensor on the tensor's device, from its shape, dtype and a sample of its elements' bits.

    The sample is spread over all dimensions.  Each element has an odd factor, so that a difference in one
    element always changes the sum, and differences in several do so but for a chance of about 2**-64.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    sample = _sample(tensor.detach()).reshape(-1)
    bits = sample.view(_INTEGERS[sample.element_size()]).long()
    kind = f"{tuple(tensor.shape)} {tensor.dtype}"
    return (bits * _factors(len(bits), tensor.device)).sum() + number(kind.encode())


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A view of some elements at equal distances in each dimension, of all rows."""
    most = max(1, MOST // max(1, tensor.shape[0] if tensor.dim() else 1))
    for dim in range(1, tensor.dim()):
        length = tensor.shape[dim]
        step = max(1, -(-length // most))
        # From the middle of the first distance: rows often begin alike.
        tensor = tensor.narrow(dim, step // 2, length - step // 2) if length else tensor
        tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
        most = max(1, most // max(1, tensor.shape[dim]))
    return tensor


@cache
def _factors(length: int, device: torch.device) -> torch.Tensor:
    """Odd random numbers, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (length,), generator=generator, device="cpu")
    return (drawn | 1).to(device)
