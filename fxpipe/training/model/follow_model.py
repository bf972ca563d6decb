"""Makes a pipeline use the tensors that its model holds now: code may replace them between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpipe.errors import RunError
from fxpipe.plan.attribute_state import kept_tensors
from fxpipe.plan.dtensors import is_dtensor, local
from fxpipe.plan.rows import ShardName
from fxpipe.training.model.elsewhere import is_elsewhere
from fxpipe.training.model.partial_model import trained_elsewhere

if TYPE_CHECKING:
    from fxpipe.training.model.model_state import ModelState


def follow(state: ModelState, model: nn.Module) -> dict[str, nn.Parameter]:
    """See ``ModelState.follow_model``."""
    named = dict(model.named_parameters())
    now = {**named, **dict(model.named_buffers()), **kept_tensors(model, state.kept)}
    tables: tuple[dict[str, Any], ...] = (state.parameters, state.buffers)
    for table in tables:
        for key, old in list(table.items()):
            name = ShardName(key).tensor
            new = now.get(name)
            if new is not None and (new.is_meta or state.has_all_lanes_of(name)):
                continue  # load_state_dict gave the pipeline its own tensors
            if is_elsewhere(new):  # the pipeline has its part in memory of its own
                if key == name and not state.stale:
                    raise RunError(trained_elsewhere(name))
                continue
            new = _own_part(new, old)
            layout = state.plan.layouts.get(name)
            if layout is None:  # no rank uses it
                continue
            if new is None or (tuple(new.shape), str(new.dtype)) != (layout.shape, layout.dtype):
                now_is = "is gone" if new is None else f"is now {new.dtype} of shape {tuple(new.shape)}"
                remedy = "Put such a tensor there, or compile" if name in state.kept else "Compile"
                raise RunError(
                    f"The model's {name}, {layout.dtype} of shape {layout.shape}, {now_is}. {remedy} the "
                    "model again."
                )
            if new.device != state.device:
                raise RunError(
                    f"The model's {name} is on {new.device}, and the pipeline was compiled for "
                    f"{state.device}. Move the model back, or compile it again."
                )
            if key != name:  # rows, whose table has values again
                state.rows[key] = table.pop(key)
            if new is not old:
                table[name] = new
    return named


def _own_part(new: torch.Tensor | None, old: torch.Tensor) -> torch.Tensor | None:
    """The part of a DTensor that this process has: ``old``, if it is that already."""
    if not is_dtensor(new):
        return new
    assert new is not None
    part = local(new).detach()
    if (part.data_ptr(), part.shape, part.dtype) == (old.data_ptr(), old.shape, old.dtype):
        return old.requires_grad_(new.requires_grad)
    return nn.Parameter(part, new.requires_grad) if isinstance(old, nn.Parameter) else part
