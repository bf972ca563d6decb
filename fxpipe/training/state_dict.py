"""State dicts: the parameters and buffers of the whole model under the names of the model's own state
dict."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fxpipe.errors import ArtifactError, RunError
from fxpipe.plan.artifact import Plan
from fxpipe.plan.kept import kept_slots, kept_tensors
from fxpipe.plan.rows import rows_of, whole_name
from fxpipe.training.fresh_buffers import fresh_buffers
from fxpipe.training.model_state import ModelState


def state_dict(state: ModelState) -> dict[str, torch.Tensor]:
    """See ``Pipeline.state_dict``."""
    state.follow_model()
    held = dict(state.parameters) | state.buffers
    if state.process is not None and state.process.ranks > 1:
        model = state.of()
        if not state.synchronized or model is None:
            raise RunError(
                "Each rank has trained its part of the model. Call pipe.full_state_dict() on all ranks, or "
                "pipe.synchronize() first."
            )
        held = _tensors_of(model)
    return {key: held[name].detach() for key, name in state.plan.state}


def full_state_dict(state: ModelState, rank: int | None) -> dict[str, torch.Tensor]:
    """See ``Pipeline.full_state_dict``."""
    wanted = state.process is None or rank in (None, state.process.rank)
    values: dict[str, torch.Tensor] = {}
    for name, value in state.gathered():
        if not wanted:
            continue
        rows = rows_of(name)
        if rows is None:
            values[name] = value.to("cpu", copy=True)
            continue
        if rows.table not in values:
            values[rows.table] = state.plan.layouts[rows.table].empty(torch.device("cpu"))
        values[rows.table][rows.begin : rows.end] = value
    return {key: values[name] for key, name in state.plan.state} if wanted else {}


def copy_to_model(state: ModelState, model: nn.Module | None) -> None:
    """See ``Pipeline.synchronize``."""
    own = state.of()
    target = own if model is None else model
    if target is None and state.process is None:
        return  # all ranks are this process
    if target is None:
        raise RunError("This pipeline has no model. Give one to copy to: pipe.synchronize(model).")
    names = state.plan.layouts.keys() & _all_names(state.plan)
    known = _tensors_of(target)
    kept = kept_tensors(target, names - known.keys())
    slots, known = kept_slots(target) if kept else {}, known | kept
    for name in names:
        tensor, shape = known.get(name), state.plan.layouts[name].shape
        if tensor is None or tensor.is_meta or tuple(tensor.shape) != shape:
            raise RunError(f"The model has no {name} of shape {shape} with memory to copy to.")
    for name, value in state.gathered():
        rows = rows_of(name)
        part = known[rows.table][rows.begin : rows.end] if rows else known[name]
        if part.data_ptr() != value.data_ptr() and name in kept:
            slots[name].put(value.to(part.device, copy=True))
        elif part.data_ptr() != value.data_ptr():
            part.copy_(value)
    state.synchronized = target is own


def load_state_dict(state: ModelState, given: Mapping[str, torch.Tensor], strict: bool) -> None:
    """See ``Pipeline.load_state_dict``."""
    state.follow_model()
    held = set(map(whole_name, (*state.parameters, *state.buffers)))
    values = _values(state.plan, given, strict, held)
    values |= _not_persistent(state, held - values.keys())
    for name in [*state.parameters, *state.buffers]:
        value = values.get(whole_name(name))
        if value is not None:
            rows = rows_of(name)
            _load(state, name, value[rows.begin : rows.end] if rows else value)
    state.forget_rows()


def _load(state: ModelState, name: str, value: torch.Tensor) -> None:
    if name in state.buffers:
        old = state.buffers[name]
        if old.is_meta:
            state.buffers[name] = value.to(state.device, old.dtype, copy=True)
        else:
            state.write({name: value.to(old.dtype)})
        return
    parameter = state.parameters[name]
    if not parameter.is_meta:
        parameter.data.copy_(value)
        return
    parts = state.rows_held(name)
    if parts:
        del state.parameters[name]
    for part, rows in parts.items() if parts else {name: slice(None)}.items():
        own = value[rows].to(state.device, parameter.dtype, copy=True)
        state.parameters[part] = nn.Parameter(own, parameter.requires_grad)


def _values(
    plan: Plan, given: Mapping[str, torch.Tensor], strict: bool, held: set[str]
) -> dict[str, torch.Tensor]:
    """The given values of the tensors that this process holds, checked; the others are not read."""
    names, known = dict(plan.state), _all_names(plan)
    if strict:
        for key in given:
            if names.get(key, key) not in known:
                raise ArtifactError(f"The state dict holds {key}, which the model does not have.")
        present = {names.get(key, key) for key in given}
        for name in sorted(set(names.values()) - present):
            shape = plan.layouts[name].shape
            raise ArtifactError(f"{name}, of shape {shape}, is missing in the state dict.")
    values: dict[str, torch.Tensor] = {}
    for key in given:
        name = names.get(key, key)
        if name not in held:
            continue
        value = given[key]
        shape = plan.layouts[name].shape
        if tuple(value.shape) != shape:
            raise ArtifactError(f"{key}, of shape {shape}, has shape {tuple(value.shape)} in the state dict.")
        if name in values and not torch.equal(values[name], value):
            raise ArtifactError(
                f"{key} and {name} are one tensor in the model, and have two values in the state dict."
            )
        values[name] = value
    return values


def _not_persistent(state: ModelState, names: set[str]) -> dict[str, torch.Tensor]:
    """Values of buffers on the meta device that no state dict holds."""
    wanted = sorted(name for name in names if name in state.buffers and state.buffers[name].is_meta)
    model = state.of()
    made = [name for name in wanted if name not in state.kept]
    found = {} if model is None or not made else fresh_buffers(model, made, state.device)
    for name in wanted:
        if name not in found:
            raise ArtifactError(
                f"{name} is on the meta device, and missing in the state dict. Add its value, or make the "
                "model with real buffers."
            )
    return found


def _all_names(plan: Plan) -> set[str]:
    """The names of the model's parameters and buffers."""
    return {whole_name(name) for held in plan.tensors for name in held.state}


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach() for name, tensor in named}
