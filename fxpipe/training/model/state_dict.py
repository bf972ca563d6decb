"""State dicts: the parameters and buffers of the whole model by the names of its own state dict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fxpipe.errors import ArtifactError, OptionError, RunError
from fxpipe.plan.artifact import Plan, RankTensors, TensorLayout, holders
from fxpipe.plan.attribute_state import kept_slots, kept_tensors
from fxpipe.plan.dtensors import local
from fxpipe.plan.lanes import NO_LANES, LanePlan
from fxpipe.plan.rows import ShardName
from fxpipe.plan.spans import place_of, without_zeros
from fxpipe.plan.tensors import dtype_of
from fxpipe.runtime.job.process import Process
from fxpipe.training.model.elsewhere import bring_back, is_elsewhere
from fxpipe.training.model.model_state import ModelState
from fxpipe.training.model.partial_model import pipelines_of, registered, show_stale, tensors_of
from fxpipe.training.weights.initial_values import initialize
from fxpipe.training.weights.tensor_values import InMemory, TensorSource, are_equal, copy_to


def state_dict(state: ModelState) -> dict[str, torch.Tensor]:
    """See ``Pipeline.state_dict``."""
    state.follow_model()
    tensors = dict(state.parameters) | state.buffers
    process = state.process
    if process is not None and (process.ranks * process.lanes > 1 or state.stale):
        model = state.of()
        if not state.synchronized or model is None:
            raise RunError(
                "Each rank has trained its part of the model. Call pipe.full_state_dict() on all ranks, or "
                "pipe.synchronize() first."
            )
        tensors = registered(model)
    return {key: tensors[name].detach() for key, name in state.plan.state}


def full_state_dict(state: ModelState, rank: int | None) -> dict[str, torch.Tensor]:
    """See ``Pipeline.full_state_dict``."""
    if state.process is not None and rank is not None and rank not in range(state.process.world_size):
        last = state.process.world_size - 1
        raise OptionError(f"rank is {rank!r} and must be a process from 0 to {last}, or None for all.")
    wanted = state.process is None or rank in (None, state.process.world_rank)
    values: dict[str, torch.Tensor] = {}
    for name, lane, value in state.gathered():
        if not wanted:  # it takes part, as each value comes by a broadcast
            continue
        table, spans = name.tensor, state.spans_of(name, lane)
        if not spans:
            values[table] = value.to("cpu", copy=True)
            continue
        if table not in values:
            values[table] = state.plan.whole_layout(table).empty(torch.device("cpu"))
        place_of(values[table], spans).copy_(without_zeros(value, spans))
    return {key: values[name] for key, name in state.plan.state} if wanted else {}


def copy_to_model(state: ModelState, model: nn.Module | None) -> None:
    """See ``Pipeline.synchronize``."""
    compiled = state.of()
    target, is_own = (compiled, True) if model is None else (model, model is compiled)
    known = tensors_of(state) if target is None else registered(target)
    if target is None and state.process is None:
        return  # all ranks are this process
    if not known:
        raise RunError("This pipeline has no model. Give one to copy to: pipe.synchronize(model).")
    names = state.plan.layouts.keys() & state.plan.tensor_names
    attributes = {} if target is None else kept_tensors(target, names - known.keys())
    slots = kept_slots(target) if target is not None and attributes else {}
    for name in names:
        tensor, shape = (known | attributes).get(name), state.plan.layouts[name].shape
        if tensor is None or tensor.is_meta or tuple(local(tensor).shape) != shape:
            raise RunError(f"The model has no {name} of shape {shape} with memory to copy to.")
    if is_own:
        show_stale(state)
    for name, lane, value in state.gathered():
        if state.process is None:  # the model has the first lane's share
            value = state.plan.lanes.share(name, value, 0)
        elif lane != state.plan.lanes.holder(name.tensor, state.process.lane):
            continue
        if name in attributes:
            if is_elsewhere(attributes[name]) or attributes[name].data_ptr() != value.data_ptr():
                slots[name].put(value.to(attributes[name].device, copy=True))
            continue
        tensor = known[name.tensor]
        if is_elsewhere(tensor) and is_own:  # of a table with rows here, when these have been read
            bring_back(tensor, state.layout(ShardName(name.tensor)))
        part = name.part_of(local(tensor).detach())
        if part.data_ptr() != value.data_ptr():
            part.copy_(value)
    if is_own:
        state.filled()


def make_whole(model: nn.Module, process: Process) -> None:
    """Give a model the values that pipelines have on other processes, before it is compiled once more."""
    for state in pipelines_of(model, process):
        state.updates.settle()
        copy_to_model(state, None)


def share_values(
    process: Process,
    tensors: Sequence[RankTensors],
    tensors_here: Mapping[str, torch.Tensor],
    lanes: LanePlan = NO_LANES,
) -> None:
    """Give each tensor that several processes hold the values of the first.  All must call this.

    Ranks that build their model without a seed begin with different values, and each trains its own copy: a
    tied weight has the same gradient on all of its ranks, and would stay different for ever.

    tensors: the names by process.  tensors_here: those of this one, overwritten in place.  Those without
    values on one of them (on the meta device) are left out.  lanes: of a tensor that they share out each lane
    gets the values of the first that holds the same share.
    """
    empty = process.gather(json.dumps([name for name, t in tensors_here.items() if t.is_meta]).encode())
    without = {name for names in empty for name in json.loads(names)}
    for name, holding in holders(rank.names for rank in tensors).items():
        firsts = lanes.firsts(name.tensor, holding)
        for other in holding:
            first = firsts[other % lanes.number]
            if first != other and name not in without and process.world_rank in (first, other):
                process.send_to(tensors_here[name].detach(), first, other)


def load_state_dict(state: ModelState, values: TensorSource, strict: bool) -> None:
    """See ``Pipeline.load_state_dict``.  All is checked before anything changes; then values are read, and
    each is where it belongs before the next one is read."""
    state.follow_model()
    names = [ShardName(name) for name in (*state.parameters, *state.buffers)]
    tables = {name.tensor for name in names}
    keys = _keys(state.plan, values, strict, tables)
    made = InMemory(_not_persistent(state, tables - keys.keys()))
    for name in names:
        if name.tensor in keys:
            _load(state, name, values, keys[name.tensor])
        elif name.tensor in made.names():
            _load(state, name, made, name.tensor)
    state.changed()


def _load(state: ModelState, name: ShardName, values: TensorSource, key: str) -> None:
    """Give a parameter or buffer that the state has, or the rows of it that this rank holds, its values."""
    parts = state.rows_of(name)
    for part in parts or [name]:
        with state.filling(part) as target:
            copy_to(target, values, key, state.spans_of(part))
    if parts and state.parameters[name].is_meta:  # its rows have values of their own now
        del state.parameters[name]


def _keys(plan: Plan, values: TensorSource, strict: bool, tables: set[str]) -> dict[str, str]:
    """Name -> the given one, of the tensors that this process holds, checked."""
    names, known = dict(plan.state), plan.tensor_names
    if strict:
        _check_names(plan, values, names, known)
    keys: dict[str, str] = {}
    for key in values.names():
        name = names.get(key, key)
        if name not in tables:
            continue
        _check_layout(plan.whole_layout(name), values, key)
        if name in keys and not are_equal(values, keys[name], key):
            raise ArtifactError(
                f"{key} and {keys[name]} are one tensor in the model, and have two values in "
                f"{values.source(key)}."
            )
        keys[name] = key
    return keys


def _check_names(plan: Plan, values: TensorSource, names: Mapping[str, str], known: set[str]) -> None:
    for key in values.names():
        if names.get(key, key) not in known:
            raise ArtifactError(
                f"{values.source(key)} holds {key}, which the model does not have.{_hint(key, known)}"
            )
    present = {names.get(key, key) for key in values.names()}
    for name in sorted(set(names.values()) - present):
        shape = plan.whole_layout(name).shape
        raise ArtifactError(f"{name}, of shape {shape}, is missing in {values.source(name)}.")


def _hint(key: str, known: set[str]) -> str:
    """What to do about a name that another beginning makes one of the model's, as a sentence."""
    for name in sorted(known):
        if (compiled := key.replace("_orig_mod.", "")) != key and compiled == name:
            return (
                " torch.compile added to it; take that out: "
                "{name.replace('_orig_mod.', ''): x for name, x in state.items()}."
            )
        if name.endswith(f".{key}") or key.endswith(f".{name}"):
            longer, shorter = (name, key) if len(name) > len(key) else (key, name)
            first = repr(longer.removesuffix(shorter))
            renamed = f"{first} + name" if longer == name else f"name.removeprefix({first})"
            return (
                f" The model's {name} begins otherwise: compile the model that was saved, or rename them, "
                f"{{{renamed}: x for name, x in state.items()}}."
            )
    return ""


def _check_layout(layout: TensorLayout, values: TensorSource, key: str) -> None:
    shape, dtype, source = values.shape(key), values.dtype(key), values.source(key)
    if shape != layout.shape:
        raise ArtifactError(f"{key}, of shape {layout.shape}, has shape {shape} in {source}.")
    if not torch.can_cast(dtype, dtype_of(layout.dtype)):
        raise ArtifactError(
            f"{key}, of {layout.dtype}, is of {dtype} in {source}, which does not cast to it."
        )


def _not_persistent(state: ModelState, names: set[str]) -> dict[str, torch.Tensor]:
    """Values of buffers on the meta device that no state dict holds."""
    wanted = sorted(name for name in names if name in state.buffers and state.buffers[name].is_meta)
    model = state.of()
    made = [name for name in wanted if name not in state.kept and model is not None]
    values = {name: state.plan.layouts[name].empty(state.device) for name in made}
    written = initialize(model, values) if model is not None and values else set()
    for name in wanted:
        if name not in written:
            remedy = "" if model is not None else ", or keep the model until its weights are loaded"
            raise ArtifactError(
                f"{name} is on the meta device, and missing in the state dict. Add its value, or make the "
                f"model with real buffers{remedy}."
            )
    return values
