"""Gives a model on the meta device its initial values, each on the rank that holds it."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn

from fxpipe.errors import RunError
from fxpipe.plan.rows import ShardName
from fxpipe.training.model.model_state import ModelState
from fxpipe.training.weights.initial_values import RESETS, Initialize, initialize
from fxpipe.training.weights.tensor_values import InMemory, copy_to


def initialize_model(state: ModelState, function: Initialize | None, seed: int) -> None:
    """See ``Pipeline.initialize``.  Nothing has changed if it fails."""
    model = state.of()
    if model is None:
        raise RunError(
            "This pipeline has no model, or none any more, whose modules know how to initialize themselves. "
            "Keep the model until pipe.initialize() has run."
        )
    state.follow_model()
    on_meta = {n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta}
    if not on_meta:
        raise RunError(
            "No tensor of the model is on the meta device: all have values. To change them, initialize the "
            "model, and call pipe.share_values()."
        )
    parameters, buffers = dict(state.parameters), dict(state.buffers)
    try:
        _fill(state, model, on_meta, function, seed)
    except Exception:  # the model's own code may raise anything
        state.take_back(parameters, buffers)
        raise
    state.changed()


def _fill(
    state: ModelState, model: nn.Module, on_meta: set[str], function: Initialize | None, seed: int
) -> None:
    names = [name for name in map(ShardName, (*state.parameters, *state.buffers)) if name.tensor in on_meta]
    wanted = dict.fromkeys(part for name in names for part in state.rows_of(name) or [name])
    parts = {name for name in wanted if state.spans_of(name)}
    for part in sorted(parts):  # first, while the other tensors take no memory
        _fill_part(state, model, part, function, seed)
    with ExitStack() as stack:
        whole: dict[str, torch.Tensor] = {
            name: stack.enter_context(state.filling(name)) for name in wanted if name not in parts
        }
        _check_written(model, whole.keys() - initialize(model, whole, seed, function))
    for table in {part.tensor for part in parts if part.is_part} & state.parameters.keys():
        del state.parameters[table]  # on the meta device still: its rows stand for it


def _fill_part(
    state: ModelState, model: nn.Module, part: ShardName, function: Initialize | None, seed: int
) -> None:
    """The rows, or this lane's share, of a whole tensor, which is freed behind."""
    whole = {part.tensor: state.plan.whole_layout(part.tensor).empty(state.device)}
    _check_written(model, whole.keys() - initialize(model, whole, seed, function))
    with state.filling(part) as target:
        copy_to(target, InMemory(whole), part.tensor, state.spans_of(part))


def _check_written(model: nn.Module, left: set[str]) -> None:
    for name in sorted(left):
        path, _, short = name.rpartition(".")
        kind = type(model.get_submodule(path)).__name__
        raise RunError(
            f"Nothing initializes {name}: {kind} has no {RESETS[0]}() that writes {short}, and no "
            "_init_weights(module) around it does. Give it one, or write it in a function: "
            f"pipe.initialize(fn), where fn(module) gets each module, as by model.apply(fn)."
        )
