"""Gradients that are known to be zero: they were zeroed, and nothing has changed them since.

A step whose gradients are changed as a whole, divided by a count, must not change those of earlier steps with
them.  Where there are none it needs no second set of accumulators.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.runtime.torch_private import writes_to

_versions = WeakTensorKeyDictionary()  # gradient -> the number of in-place changes when it was zeroed


def mark_zeroed(grads: Iterable[torch.Tensor]) -> None:
    """Remember that they were zeroed just now."""
    for grad in grads:
        _versions[grad] = writes_to(grad)


def take_zeroed(grad: torch.Tensor) -> bool:
    """Whether a gradient is known to be zero; forgets it, as the caller is about to change it."""
    return bool(_versions.pop(grad, None) == writes_to(grad))
