"""Gives the contents of a checkpoint to a run, in two phases.

First everything is read and checked against the run, which does not change.  Then the run takes it, which
only the user's own objects can refuse; they are put back then.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fxpipe.errors import ArtifactError, number_of
from fxpipe.plan.artifact import Plan
from fxpipe.plan.rows import ShardName
from fxpipe.plan.spans import Spans
from fxpipe.runtime.job.failure import in_short
from fxpipe.runtime.job.process import Process, agreed
from fxpipe.strict import Mismatch, shown
from fxpipe.training.checkpoint import files, tensor_store
from fxpipe.training.checkpoint.checkpoint_files import CheckpointFiles, at, checkpoint_files
from fxpipe.training.checkpoint.training_state import (
    MODEL,
    OPTIMIZER,
    CheckpointRecord,
    TensorKind,
    averaged,
    class_of,
)
from fxpipe.training.model.model_state import ModelState
from fxpipe.training.optimizer.average import Average, OfAverage
from fxpipe.training.optimizer.optimizer import PipelineOptimizer
from fxpipe.training.optimizer.optimizer_state import MASTER
from fxpipe.training.optimizer.optimizer_trial import in_train_mode

STEP = "step"  # the key of torch's optimizers for the number of updates of a parameter


@dataclass(frozen=True, eq=False)
class RankState:
    """The state that one rank takes from a checkpoint.

    ``values``: of the parameters, rows and buffers that it holds.  ``optimizer``: as it takes its state.
    ``averages``: values of averages of weights, by the name of the user's state.
    """

    path: Path
    step_number: int
    run: str
    values: Mapping[ShardName, torch.Tensor]
    optimizer: dict[str, object]
    user: dict[str, object]
    averages: Mapping[str, Mapping[ShardName, torch.Tensor]]


def contents_for(
    model: ModelState,
    optimizer: PipelineOptimizer | None,
    user: Mapping[str, Stateful],
    path: Path,
    record: CheckpointRecord,
    rank: int,
) -> RankState:
    """Read what a rank takes from a checkpoint.

    Raises ArtifactError where the checkpoint is not of this model, or lacks the state of the optimizer or the
    user.
    """
    checkpoint, plan = checkpoint_files(path, record), model.plan
    model.follow_model()
    _check_model(plan, checkpoint)
    for name in user:
        if name not in checkpoint.user:
            known = ", ".join(sorted(checkpoint.user)) or "none"
            raise ArtifactError(f"{path} holds no state {name!r}; it holds {known}.")
    left = sorted(checkpoint.user.keys() - user.keys())
    if left and optimizer is not None:  # without one, the values alone are wanted
        warnings.warn(
            f"{path} also holds the state {', '.join(left)}, which stays there: Checkpointer(…, state=…) "
            "takes the objects that it is for.",
            stacklevel=4,
        )
    states = checkpoint.user | _of_replica(checkpoint, user, model.process)
    if optimizer is not None:
        _check_optimizer(plan, optimizer, checkpoint)
    with files.reading(path):
        for name, thing in user.items():
            if isinstance(thing, LRScheduler):  # which takes whatever it is given
                if not isinstance(states[name], dict):
                    raise Mismatch(f"is {shown(states[name])} and must be an object", at("user", name))
                _check_options(states[name], thing.state_dict(), (), at("user", name))
    if record.seed != plan.step.seed:
        warnings.warn(
            f"{path} is of a run with seed {record.seed}, and this pipeline was compiled with "
            f"{plan.step.seed}: random ops draw other numbers than that run would have.",
            stacklevel=4,
        )
    with files.reading(path):
        names = model.stored_by(rank).state
        read = tensor_store.read(
            checkpoint.tensors, [(MODEL + name.tensor, model.spans_of(name)) for name in names]
        )
        values = dict(zip(names, read, strict=True))
        state = {} if optimizer is None else _optimizer_state(model, optimizer, checkpoint, values)
        averages = {
            key: _averages(key, thing.average, model, checkpoint)
            for key, thing in user.items()
            if isinstance(thing, OfAverage)
        }
    return RankState(path, record.step_number, record.run, values, state, states, averages)


def _averages(
    key: str, average: Average, model: ModelState, checkpoint: CheckpointFiles
) -> dict[ShardName, torch.Tensor]:
    """Raises Mismatch where the checkpoint lacks an average, or has another one."""
    for name, value in average.values.items():
        kind = TensorKind(model.plan.whole_layout(name.tensor).shape, str(value.dtype))
        stored = checkpoint.tensors.get(averaged(key, name.tensor))
        there = None if stored is None else TensorKind.of(stored)
        if there != kind:
            raise Mismatch(f"has {there or 'none'}, and {kind} here", averaged(key, name.tensor))
    read = tensor_store.read(
        checkpoint.tensors, [(averaged(key, name.tensor), model.spans_of(name)) for name in average.values]
    )
    return dict(zip(average.values, read, strict=True))


def restore(
    model: ModelState, optimizer: PipelineOptimizer | None, user: Mapping[str, Stateful], contents: RankState
) -> None:
    """Give a rank its contents.  All ranks must call it.

    Raises ArtifactError on all of them, and nothing has changed, if an object of one does not take its state.
    """
    undo: list[Callable[[], object]] = []
    try:
        with agreed(model.process, f"resume from {contents.path}"):
            if optimizer is not None:
                _give(optimizer, contents.optimizer, "the optimizer", contents.path, undo)
            for name, thing in user.items():
                _give(thing, contents.user[name], f"state[{name!r}]", contents.path, undo)
    except Exception:  # the user's objects may raise anything
        for back in reversed(undo):
            with contextlib.suppress(Exception):  # of the object that failed, as the error raised here says
                back()
        raise
    # All ranks have taken the user's state: from here on nothing can be refused, so values may change.
    for key, averages in contents.averages.items():
        for name, value in averages.items():
            user[key].average.values[name].copy_(value)  # type: ignore[attr-defined]
    for name, value in contents.values.items():
        with torch.no_grad(), model.filling(name) as target:
            target.copy_(value)
    model.changed()
    model.run = contents.run


def _give(thing: Stateful, state: Any, what: str, path: Path, undo: list[Callable[[], object]]) -> None:
    # Copied before the load: an object that fails half way through is put back as well.
    undo.append(partial(thing.load_state_dict, copy.deepcopy(thing.state_dict())))
    try:
        thing.load_state_dict(state)
    except Exception as error:  # the user's object may raise anything
        kind = type(thing).__name__
        raise ArtifactError(
            f"{path / files.STATE}: {what} ({kind}) does not take its state: {in_short(error)}"
        ) from error


def _of_replica(
    checkpoint: CheckpointFiles, user: Collection[str], process: Process | None
) -> dict[str, object]:
    """The states that each replica has its own of, by name.  Raises ArtifactError for other replicas."""
    replica, replicas = (0, 1) if process is None else (process.replica, process.replicas)
    chosen = {name: states for name, states in checkpoint.by_replica.items() if name in user}
    for name, states in chosen.items():
        if len(states) != replicas:
            raise ArtifactError(
                f"{checkpoint.path} holds another state {name!r} for each of "
                f"{number_of(len(states), 'replica')}, and this run has {replicas}. Start as many replicas, "
                f"or leave {name!r} out of state=."
            )
    return {name: states[replica] for name, states in chosen.items()}


def _check_model(plan: Plan, checkpoint: CheckpointFiles) -> None:
    names = plan.tensor_names
    stored_names = {name.removeprefix(MODEL) for name in checkpoint.tensors if name.startswith(MODEL)}
    for name in sorted(names | stored_names):
        layout = plan.whole_layout(name) if name in names else None
        here = None if layout is None else TensorKind(layout.shape, layout.dtype)
        there = TensorKind.of(checkpoint.tensors[MODEL + name]) if name in stored_names else None
        if here != there:
            raise ArtifactError(
                f"{checkpoint.path} is of another model: {name} has {here or 'no such tensor'} in this one, "
                f"and {there or 'no tensor'} in the checkpoint."
            )


def _check_optimizer(plan: Plan, optimizer: PipelineOptimizer, checkpoint: CheckpointFiles) -> None:
    """Class, groups and names must be those of the optimizer; its state of a parameter, it alone knows."""
    path, groups = checkpoint.path, optimizer.param_groups
    if checkpoint.record.optimizer != class_of(optimizer):
        raise ArtifactError(
            f"{path} has the state of {checkpoint.record.optimizer or 'no optimizer'}, and this run has "
            f"{class_of(optimizer)}. Make the same optimizer, or resume without one."
        )
    if len(checkpoint.groups) != len(groups):
        raise ArtifactError(
            f"{path} has the state of an optimizer with {number_of(len(checkpoint.groups), 'group')}, and "
            f"this one has {len(groups)}. Make it with the same groups."
        )
    trained = plan.trained
    with files.reading(path):
        for k, (saved, group) in enumerate(zip(checkpoint.groups, groups, strict=True)):
            kind = optimizer.of_groups[k]
            for key in kind.defaults:
                if key not in saved:
                    raise Mismatch(f"lacks {shown(key)}", at("groups", k))
            _check_options(saved, group, _optional(kind), at("groups", k))
            _check_update(optimizer, type(kind), saved, group, checkpoint, at("groups", k))
        for name in sorted(checkpoint.state.keys() | checkpoint.fields.keys()):
            if name not in trained:
                raise Mismatch(f"holds the optimizer's state of {shown(name)}, which it does not train")
            steps = checkpoint.fields.get(name, {}).get(STEP, 0)
            if not _is_count(steps):
                raise Mismatch(f"is {shown(steps)}, which is no number of steps", at("fields", name, STEP))


def _optional(optimizer: Optimizer) -> set[str]:
    """The options that may be None."""
    parameters = inspect.signature(type(optimizer)).parameters.values()
    return {parameter.name for parameter in parameters if parameter.default is None}


def _check_options(
    saved: Mapping[str, object], here: Mapping[str, object], optional: Collection[str], place: str
) -> None:
    """Raise Mismatch for a value that cannot take the place of the one that is here."""
    for key in saved.keys() & here.keys():
        left_out = saved[key] is None and key in optional
        if not left_out and not _fits(saved[key], here[key]):
            raise Mismatch(f"is {shown(saved[key])}, and {shown(here[key])} here", f"{place}[{key!r}]")


def _check_update(
    optimizer: PipelineOptimizer,
    kind: type[Optimizer],
    saved: Mapping[str, object],
    group: Mapping[str, Any],
    checkpoint: CheckpointFiles,
    place: str,
) -> None:
    """Raise Mismatch for options of a group that the optimizer refuses, or with which it cannot update."""
    like = group["params"][0].detach() if group["params"] else torch.zeros(2, 2)
    try:
        entries = _entries_of_update(kind, group, like)
    except Exception:  # noqa: BLE001 - a class of the user's, whose updates need more than a small parameter
        return
    try:
        entries = _entries_of_update(kind, saved, like) - entries
    except Exception as error:  # a class of the user's may raise anything
        raise Mismatch(f"has options that {kind.__name__} fails with: {error!r}", place) from error
    for name in {ShardName(optimizer.names[p]).tensor for p in group["params"]} if entries else ():
        there = {*checkpoint.state.get(name, ()), *checkpoint.fields.get(name, ())}
        if there and (missing := sorted(entries - there)):
            raise Mismatch(
                f"has options that need {shown(missing[0])}, which the state of {name} lacks", place
            )


def _entries_of_update(kind: type[Any], group: Mapping[str, object], like: torch.Tensor) -> set[str]:
    """The entries that an optimizer with a group's options keeps of a small parameter after an update."""
    parameter = torch.nn.Parameter(like.new_zeros([min(2, length) for length in like.shape]))
    parameter.grad = torch.zeros_like(parameter)
    options = {key: value for key, value in group.items() if key != "params"}
    known = {key: options[key] for key in inspect.signature(kind).parameters if key in options}
    trial = in_train_mode(kind([{"params": [parameter], **options}], **known))
    trial.step()
    return {*trial.state[parameter]}


def _fits(value: Any, here: object) -> bool:
    """Whether a value is of the kind of another, and finite if that is."""
    if here is None:
        return True
    if isinstance(here, bool) or isinstance(value, bool):
        return isinstance(here, bool) and isinstance(value, bool)
    if isinstance(here, (list, tuple)):
        fits = isinstance(value, (list, tuple)) and len(value) == len(here)
        return fits and all(_fits(a, b) for a, b in zip(value, here, strict=True))
    if isinstance(here, (int, float, torch.Tensor)):
        return isinstance(value, (int, float, torch.Tensor)) and (_is_finite(value) or not _is_finite(here))
    return isinstance(value, type(here))


def _is_finite(value: float | torch.Tensor) -> bool:
    return bool(value.isfinite().all()) if isinstance(value, torch.Tensor) else isfinite(value)


def _is_count(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 and not value.is_complex() else None
    return isinstance(value, (int, float)) and isfinite(value) and value >= 0 and value == int(value)


def _optimizer_state(
    model: ModelState,
    optimizer: PipelineOptimizer,
    checkpoint: CheckpointFiles,
    values: Mapping[ShardName, torch.Tensor],
) -> dict[str, object]:
    """The state of this rank's parameters as ``load_state_dict`` takes it.  Raises Mismatch for values of
    another form than the optimizer's."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = [ShardName(optimizer.names[parameter]) for parameter in parameters]
    entries: list[tuple[int, str]] = []
    wanted: list[tuple[str, Spans]] = []
    for k, name in enumerate(names):
        for entry in checkpoint.state.get(name.tensor, ()):
            entries.append((k, entry))
            wanted.append((f"{OPTIMIZER}{name.tensor}.{entry}", model.spans_of(name)))
    plain = checkpoint.fields
    state = {k: dict(plain[name.tensor]) for k, name in enumerate(names) if plain.get(name.tensor)}
    for (k, entry), value in zip(entries, tensor_store.read(checkpoint.tensors, wanted), strict=True):
        place = f"{OPTIMIZER}{names[k].tensor}.{entry}"
        if entry == STEP and not _is_count(value):
            raise Mismatch(f"is {shown(value.tolist())}, which is no number of steps", place)
        if entry == MASTER and value.shape != parameters[k].shape:
            raise Mismatch(
                f"has shape {tuple(value.shape)}, and the parameter {tuple(parameters[k].shape)}", place
            )
        state.setdefault(k, {})[entry] = value
    for k, parameter in enumerate(parameters):
        if parameter in optimizer.masters:
            state.setdefault(k, {}).setdefault(MASTER, _value_of(names[k], values))
    numbers = iter(range(len(parameters)))
    return {
        "state": state,
        "param_groups": [
            {**options, "params": [next(numbers) for _ in group["params"]]}
            for options, group in zip(checkpoint.groups, optimizer.param_groups, strict=True)
        ],
    }


def _value_of(name: ShardName, values: Mapping[ShardName, torch.Tensor]) -> torch.Tensor:
    """The value of a parameter, or of rows of one that this process has, or of which it has more rows."""
    if name in values:
        return values[name]
    whole = next(other for other in values if other.contains(name))
    return values[whole][name.begin - whole.begin : name.end - whole.begin]
