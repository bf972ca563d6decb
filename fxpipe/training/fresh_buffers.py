"""Values of buffers that no state dict holds: those that a module computes when it is made (rotary
tables)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def fresh_buffers(model: nn.Module, names: Sequence[str], device: torch.device) -> dict[str, torch.Tensor]:
    """The values that the model's own initialization gives to buffers; those it does not write are left out.

    A model on the meta device has no values, and a checkpoint does not hold its non-persistent buffers.
    ``_init_weights(module)`` of the model (the protocol of Hugging Face) or ``reset_parameters()`` of the
    module that owns the buffer is called on a copy of the module without parameters.
    """
    found = {}
    initialize: Callable[[nn.Module], Any] | None = getattr(model, "_init_weights", None)
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = copy.copy(model.get_submodule(path))
        own = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == path}
        module._parameters = {n: _on_meta(p) for n, p in module._parameters.items()}
        module._buffers = {
            n: None if b is None else torch.empty_like(b, device=device if n in own else "meta")
            for n, b in module._buffers.items()
        }
        before = {n: b._version for n, b in module._buffers.items() if b is not None}
        with torch.no_grad():
            if initialize is not None:
                initialize(module)
            elif (reset := getattr(module, "reset_parameters", None)) is not None:
                reset()
        for short, name in own.items():
            value = module._buffers[short]
            if value is not None and not value.is_meta and value._version != before[short]:
                found[name] = value
    return found


def _on_meta(parameter: nn.Parameter | None) -> nn.Parameter | None:
    return None if parameter is None else nn.Parameter(parameter.to("meta"), parameter.requires_grad)
