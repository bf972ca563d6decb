"""The buffers that a traced forward replaced by other tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxpipe.capture.functional import writes_to_a_parameter
from fxpipe.capture.inputs import TracedInput
from fxpipe.capture.reads.data_assignment import DataAssignments
from fxpipe.capture.state.registered import Registered
from fxpipe.errors import CaptureError
from fxpipe.ir.graph import Kind
from fxpipe.plan.dtensors import local


def replaced_buffers(
    pairs: Sequence[tuple[Registered, TracedInput]], assigned: DataAssignments
) -> dict[str, torch.Tensor]:
    """The buffers that the forward replaced.  Raises CaptureError for a change that is not supported.

    pairs: the model's tensors, each with what stands for it in the trace.
    """
    replaced = {}
    for r, x in pairs:
        kind = r.kind.value
        if x.local.untyped_storage()._cdata != x.storage:
            raise CaptureError(
                f"The forward gives the {kind} {r.name!r} other memory (set_ or resize_). Copy into it "
                "instead; or, if the first batch alone does it, run the model on one batch before you "
                "compile it."
            )
        now = r.now()
        if all(t is x.fake for t in now):
            if assigned.data(x.fake) is not None:
                if r.tensor.requires_grad:
                    raise writes_to_a_parameter(r.name, assigned.place(x.fake))
                replaced[r.name] = local(x.fake).detach()
            continue
        new = now[0]
        if r.kind is Kind.PARAMETER or new is None or any(t is not new for t in now):
            what = "one of its names another tensor" if len(now) > 1 else "another tensor, or takes it away"
            raise CaptureError(
                f"The forward gives the {kind} {r.name!r} {what}. Replace parameters outside of the "
                "forward, and write to a shared buffer in place."
            )
        new = local(new)
        if (new.shape, new.dtype, new.device) != (x.local.shape, x.local.dtype, x.local.device):
            raise CaptureError(
                f"The forward changes the buffer {r.name!r} from {kind_of(x.local)} to "
                f"{kind_of(new)}. A program keeps shapes and dtypes: give the buffer those that it has "
                "later on from the start, or run the model on one batch before you compile it."
            )
        replaced[r.name] = new
    return replaced


def aliases(
    pairs: Sequence[tuple[Registered, TracedInput]],
    replaced: dict[str, torch.Tensor],
    assigned: DataAssignments,
) -> list[tuple[str, str]]:
    """Pairs of names: the forward gave the second, a buffer, the memory of the first.

    Raises CaptureError if the first is a parameter, as the optimizer writes to its memory.
    """
    owners: dict[int, Registered] = {}
    shared = []
    for r, x in pairs:
        data = assigned.data(x.fake)
        now = replaced.get(r.name, x.fake) if data is None else data
        owner = owners.setdefault(now.untyped_storage()._cdata, r)
        if owner is r or not (r.name in replaced or owner.name in replaced):
            continue
        if owner.kind is Kind.PARAMETER and owner.tensor.requires_grad:
            raise CaptureError(
                f"The forward gives the buffer {r.name!r} the memory of the parameter {owner.name!r}, "
                "which moves when that is trained. Give it a copy: .detach().clone()."
            )
        shared.append((owner.name, r.name))
    return shared


def put_back(pairs: Sequence[tuple[Registered, TracedInput]]) -> None:
    """Let the model hold the tensors of the trace's inputs again, under all of their names."""
    for r, x in pairs:
        for slot in r.slots:
            if slot.get() is not x.fake:
                slot.put(x.fake)


def kind_of(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
