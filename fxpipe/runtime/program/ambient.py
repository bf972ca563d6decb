"""Sets torch's global state that ops depend on as in the trace: autocast, default dtype, grad mode, devices.

A program has each cast as an op and its own backward, so the caller's settings must not change its ops.
It names the devices of its tensors; those without a name are words for other ranks, which are on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fxpipe.plan.tensors import dtype_of
from fxpipe.runtime.program.accelerator import current


@contextlib.contextmanager
def as_traced(default_dtype: str, device: torch.device) -> Iterator[None]:
    """Run a block with torch's global state as in the trace.  default_dtype: as text, "torch.float32"; the
    result dtype of divided integers, ranges, fresh zeros."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype_of(default_dtype))
    try:
        uncast = torch.autocast(device.type, enabled=False)
        is_cpu = torch.get_default_device().type == "cpu"
        on_cpu = contextlib.nullcontext() if is_cpu else torch.device("cpu")
        with torch.inference_mode(False), torch.no_grad(), uncast, current(device), on_cpu:
            yield
    finally:
        torch.set_default_dtype(before)
