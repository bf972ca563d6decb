"""Lends the user's model to the trace: it has fake tensors during the trace and is restored afterwards.

A forward may write anything to its modules: it caches tables, counts calls, registers buffers, casts a layer.
During the trace those would be fake tensors.  So the state that its code reaches is recorded before the trace
and restored after it, also after an error.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from fxpipe.capture.provenance import Provenance
from fxpipe.capture.state.recorded_state import RecordedState
from fxpipe.errors import CaptureError
from fxpipe.python_state.walk import PythonState
from fxpipe.runtime.torch_private import tensors_by_kind


def _convert(
    path: str, module: nn.Module, provenance: Provenance, function: Any, recurse: bool = True
) -> nn.Module:
    """``module.to(…)`` inside the forward: a no-op, or an error.

    nn.Module's own implementation replaces the tensors, which the trace could not follow.
    """
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        new = function(tensor)
        if (new.dtype, new.device) != (tensor.dtype, tensor.device):
            provenance.answers.refusals.refuse(
                CaptureError(
                    f"The forward converts the module {path!r} from {tensor.dtype} on {tensor.device} to "
                    f"{new.dtype} on {new.device}, at {provenance.place()}. Convert it once, before you "
                    "compile."
                )
            )
    return module


def _convert_own(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """``module.to(…)`` of a module that the forward made; nn.Module's own swaps memory."""
    for child in module.children() if recurse else ():
        child._apply(function)
    parameters, buffers = tensors_by_kind(module)
    for key, parameter in parameters.items():
        if parameter is not None:
            parameters[key] = nn.Parameter(function(parameter.detach()), parameter.requires_grad)
    for key, buffer in buffers.items():
        buffers[key] = None if buffer is None else function(buffer)
    return module


@contextlib.contextmanager
def borrowed(
    model: nn.Module, walked: PythonState, fakes: dict[int, torch.Tensor], provenance: Provenance
) -> Iterator[RecordedState]:
    """The model with fake tensors; on exit the model, the loss function, the caches of the functions that it
    called, the random number generators and the default dtype are restored.

    walked: what the model and the loss function reach.
    fakes: id of a parameter or buffer -> the fake tensor in its place, under each of its names.
    provenance: of the trace.
    """
    recorded = RecordedState.of(walked)
    generators, dtype = (random.getstate(), np.random.get_state()), torch.get_default_dtype()
    convert: Any = nn.Module._apply
    try:
        recorded.put_in_place(lambda x: fakes.get(id(x)))
        for path, module in model.named_modules():
            module.__dict__["_apply"] = partial(_convert, path, module, provenance)
        nn.Module._apply = _convert_own  # type: ignore[method-assign]
        recorded.begin()
        with torch.random.fork_rng(devices=[]):
            yield recorded
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]
        recorded.restore()
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.set_default_dtype(dtype)
