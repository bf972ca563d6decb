"""Refuses parameters and buffers that the forward registers when it first runs.

A program has the tensors that the model has when it is compiled.  A buffer that every forward would compute
anew, of constants and of buffers that do not change, is no state, and stays an op of the program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fxpipe.capture.functional import is_mutating
from fxpipe.capture.reads.specialization import Specialization
from fxpipe.capture.state.registered import Registered
from fxpipe.errors import CaptureError
from fxpipe.ir import compat


def check_made(model: nn.Module, before: Sequence[Registered], answers: Specialization) -> None:
    """Raise CaptureError for state that the traced forward added to the model; ``before``: its tensors."""
    known = {(id(slot.module), slot.keys) for x in before for slot in x.slots}
    for path, module in model.named_modules():
        for what in ("parameter", "buffer"):
            for key, tensor in getattr(module, table := f"_{what}s").items():
                if tensor is None or (id(module), (table, key)) in known:
                    continue
                if what == "parameter" or _is_state(tensor, answers):
                    node = compat.traced_node(tensor)
                    origin = None if node is None else node.meta.get("origin")
                    place = "" if origin is None else f", at {origin}"
                    raise CaptureError(
                        f"The forward gives the model the {what} {f'{path}.{key}'.lstrip('.')!r}{place}. A "
                        "program has the tensors that the model has before: make it in __init__, or run the "
                        "model on one batch before you compile it."
                    )


def _is_state(buffer: torch.Tensor, answers: Specialization) -> bool:
    """Whether the forward wrote to a new buffer, or computed it of what changes."""
    node = compat.traced_node(buffer)
    return node is not None and (is_mutating(node) or not answers.is_lasting(buffer))
