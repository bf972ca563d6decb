"""Checks that all ranks compile alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxpipe.compiler.options import Settings
from fxpipe.errors import CaptureError
from fxpipe.plan.dtensors import is_dtensor
from fxpipe.runtime.batch.microbatches import batch_leaves
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.ranks.agreement import first_difference


def arguments_of(
    model: nn.Module, example: object, loss_fn: Callable[..., object] | None, options: Settings
) -> dict[str, str]:
    """The arguments of ``compile`` that must be alike on all ranks, all but values, as texts by name."""
    texts = {f.name: repr(getattr(options, f.name)) for f in fields(options) if f.name not in _OF_MACHINE}
    texts["offload"] = repr(replace(options.offload, directory=None))
    texts["loss_fn"] = getattr(loss_fn, "__qualname__", type(loss_fn).__name__)
    for name, value in batch_leaves(example):
        is_tensor = isinstance(value, torch.Tensor)
        texts[f"example.{name}"] = f"{value.dtype} {tuple(value.shape)}" if is_tensor else repr(value)
    texts["model"] = type(model).__qualname__
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
        shape = "" if is_lazy(tensor) else f" {tuple(tensor.shape)}"
        placed = f" {getattr(tensor, 'placements', '')}" if is_dtensor(tensor) else ""
        texts[f"model.{name}"] = f"{tensor.dtype}{shape}{placed}{frozen}"
    return texts


#: Options that differ between machines.
_OF_MACHINE = ("ranks_per_machine", "offload", "mesh")


def check_lanes(process: Process, traced: Callable[[], str]) -> None:
    """Raise CaptureError on all processes unless the model of the first, as the last lane of its rank would
    run it, is what the model of that lane runs: code may have kept the number of its process."""
    last, trace = process.lanes - 1, b""
    with process.agreed("trace its model"), process.unhurried():  # the others do not trace, and wait
        if process.world_rank in (0, last):
            trace = traced().encode()
    digests = process.gather(hashlib.sha256(trace).digest())  # short, where the texts are megabytes
    if digests[0] == digests[last]:
        return
    texts = process.gather(trace)
    _, theirs, ours = first_difference(texts[last], texts[0])
    raise CaptureError(
        f"The model of process {last}, the last lane of rank 0, runs other ops than that of process 0 "
        f"would on that lane: {theirs}, and there {ours}. All lanes run one program: let a module keep "
        "neither the number of its process nor what follows from it, and ask mesh.get_local_rank() in the "
        "forward."
    )
