"""The inputs of a trace: a fake tensor for each parameter, buffer and tensor of the example.

model, example  ──►  one ``TracedInput`` for each placeholder of the traced graph, in its order
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fxpipe.capture.lanes.dtensors import like
from fxpipe.capture.state.registered import check_class, registered
from fxpipe.errors import BatchError, CaptureError
from fxpipe.ir import compat
from fxpipe.ir.graph import Input, Kind
from fxpipe.plan.dtensors import local
from fxpipe.plan.tensors import is_dense
from fxpipe.runtime.batch.microbatches import batch_leaves
from fxpipe.runtime.torch_private import storage_number

#: Maximum number of elements of an input whose values are part of the program.
LARGEST_FIXED = 4096


@dataclass(frozen=True, eq=False)
class TracedInput:
    """A placeholder of the trace, with its tensor.

    ``fake``: the tensor in the model's hands, a DTensor where the model has one.  ``local``: the one of the
    trace, which is the same where it is none.
    """

    input: Input
    real: torch.Tensor
    fake: torch.Tensor
    local: torch.Tensor
    storage: int  # of the fake tensor, before the trace
    fixed: bool = False  # its values are part of the program


def inputs(
    model: nn.Module,
    example: object,
    mode: compat.FakeMode,
    device: torch.device,
    fixed: Sequence[str],
    kept: Mapping[str, bool],
) -> list[TracedInput]:
    """Parameters, buffers, kept tensors and those of the microbatch, in this order.

    kept: names of tensors in plain attributes -> whether the forward keeps them with a gradient's history.
    """
    lazy = [n for n, p in model.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise CaptureError(
            f"The parameter {lazy[0]!r} has no shape yet (a lazy module). Run the model on one batch first."
        )

    def fake(name: str, tensor: torch.Tensor) -> torch.Tensor:
        check_class(name, tensor)
        if tensor.layout is not torch.strided or tensor.is_nested:
            layout = "nested (jagged)" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise CaptureError(
                f"{name!r} is {layout}; fxpipe takes dense tensors. Pad it, or make it from dense tensors "
                "inside the forward."
            )
        if tensor.is_meta:
            with mode:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return mode.from_tensor(tensor.detach() if is_dense(tensor) else tensor.detach().contiguous())

    traced: list[TracedInput] = []

    def add(kind: Kind, name: str, real: torch.Tensor, stand_in: torch.Tensor) -> None:
        fix = kind is Kind.BATCH and name in fixed
        for attribute, value in vars(real).items():  # set by the model on the tensor
            setattr(stand_in, attribute, value)
        part = local(stand_in)
        traced.append(TracedInput(Input(kind, name), real, stand_in, part, storage_number(part), fix))

    for entry in registered(model, kept):
        stand_in = like(entry.tensor, fake(entry.name, entry.local))
        if entry.kind is Kind.PARAMETER:
            stand_in.requires_grad_(entry.tensor.requires_grad)
            compat.mark_as_parameter(stand_in)
        elif entry.is_kept:
            stand_in.requires_grad_(kept[entry.name])
        add(entry.kind, entry.name, entry.tensor, stand_in)
    leaves = dict(batch_leaves(example))
    for name in fixed:
        if not isinstance(leaves.get(name), torch.Tensor):
            tensors = ", ".join(n for n, x in leaves.items() if isinstance(x, torch.Tensor))
            raise CaptureError(f"fixed names {name!r}, which is no tensor of the example. It has: {tensors}.")
        if leaves[name].numel() > LARGEST_FIXED:
            raise CaptureError(
                f"fixed names {name!r}, which has {leaves[name].numel()} elements: at most {LARGEST_FIXED} "
                "can be written into a program."
            )
    rows = {name: len(x) for name, x in leaves.items() if isinstance(x, torch.Tensor) and x.dim()}
    if rows and not any(rows.values()):
        raise BatchError(f"{min(rows)!r} of the example has no rows. Give it those of one microbatch.")
    for name, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            add(Kind.BATCH, name, leaf, fake(name, leaf).requires_grad_(leaf.requires_grad))
    return traced
