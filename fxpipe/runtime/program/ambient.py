"""Sets torch's global state that ops depend on as in the trace: autocast, default dtype, grad mode, device.

A program has each cast as an op and its own backward, so the caller's settings must not change its ops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fxpipe.plan.tensors import dtype_of
from fxpipe.runtime.program.accelerator import current


@contextlib.contextmanager
def as_traced(default_dtype: str, device: torch.device) -> Iterator[None]:
    """default_dtype: as text, "torch.float32"; the result dtype of divided integers, ranges, fresh zeros."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype_of(default_dtype))
    try:
        uncast = torch.autocast(device.type, enabled=False)
        with torch.inference_mode(False), torch.no_grad(), uncast, current(device):
            yield
    finally:
        torch.set_default_dtype(before)
