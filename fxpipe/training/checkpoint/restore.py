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
from fxpipe.strict import Misfit, shown
from fxpipe.training.checkpoint import files, tensor_store
from fxpipe.training.checkpoint.plain import from_json
from fxpipe.training.checkpoint.tensor_store import Stored
from fxpipe.training.checkpoint.training_state import (
    GROUPS,
    MODEL,
    OPTIMIZER,
    USER,
    CheckpointRecord,
    TensorKind,
    averaged,
    class_of,
)
from fxpipe.training.model.model_state import ModelState
from fxpipe.training.optimizer.average import Average, OfAverage
from fxpipe.training.optimizer.optimizer import MASTER, PipelineOptimizer

STEP = "step"  # the key of torch's optimizers for the number of updates of a parameter


@dataclass(frozen=True, eq=False)
class CheckpointFiles:
    """A checkpoint whose files fit each other: its record decoded, and where its tensors are.

    ``state``: parameter -> the names of the tensors of the optimizer's state of it.
    """

    path: Path
    record: CheckpointRecord
    groups: list[dict[str, Any]]
    fields: dict[str, dict[str, Any]]
    user: dict[str, Any]
    by_replica: dict[str, tuple[Any, ...]]
    tensors: Mapping[str, Stored]
    state: Mapping[str, list[str]]


@dataclass(frozen=True, eq=False)
class RankState:
    """What one rank takes from a checkpoint.

    ``values``: of the parameters, rows and buffers that it holds.  ``optimizer``: as it takes its state.
    ``averages``: values of averages of weights, by the name of the user's state.
    """

    path: Path
    step_number: int
    run: str
    values: Mapping[ShardName, torch.Tensor]
    optimizer: dict[str, Any]
    user: dict[str, Any]
    averages: Mapping[str, Mapping[ShardName, torch.Tensor]]


def held_in(path: Path, record: CheckpointRecord) -> CheckpointFiles:
    """Raises ArtifactError, naming file and field, where the files of a checkpoint contradict each other."""
    with files.reading(path):
        step = files.step_of(path)
        if step not in (None, record.step_number):
            raise Misfit(
                f"is {record.step_number}, in the checkpoint of step {step}", f"{files.STATE}: step_number"
            )
        tensors = tensor_store.stored(path, files.tensor_files(files.read_sums(path)))
        _check_kinds(record.tensors, tensors)
        for _, tensor in record.names:
            if MODEL + tensor not in tensors:
                raise Misfit(f"has the name {shown(tensor)}, and no file holds it", f"{files.STATE}: names")
        inside = [name for name in tensors if name.startswith((GROUPS, USER))]
        read = tensor_store.read(tensors, [(name, {}) for name in inside])
        extra = dict(zip(inside, read, strict=True))
        groups, fields, user = (
            _decoded(name, given, extra)
            for name, given in (("groups", record.groups), ("fields", record.fields), ("user", record.user))
        )
        by_replica = {
            name: tuple(_plain(own, extra, _at("by_replica", name, k)) for k, own in enumerate(found))
            for name, found in record.by_replica.items()
        }
        state: dict[str, list[str]] = {}
        for key in tensors:
            if key.startswith(OPTIMIZER):
                name, _, entry = key.removeprefix(OPTIMIZER).rpartition(".")
                state.setdefault(name, []).append(entry)
        for name, own in fields.items():
            for entry in own:
                if entry in state.get(name, ()):
                    raise Misfit(f"holds {shown(entry)}, which is a tensor", _at("fields", name))
        return CheckpointFiles(path, record, groups, fields, user, by_replica, tensors, state)


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
    held, plan = held_in(path, record), model.plan
    model.follow_model()
    _check_model(plan, held)
    for name in user:
        if name not in held.user:
            known = ", ".join(sorted(held.user)) or "none"
            raise ArtifactError(f"{path} holds no state {name!r}; it holds {known}.")
    left = sorted(held.user.keys() - user.keys())
    if left and optimizer is not None:  # without one, the values alone are wanted
        warnings.warn(
            f"{path} also holds the state {', '.join(left)}, which stays there: Checkpointer(…, state=…) "
            "takes the objects that it is for.",
            stacklevel=4,
        )
    given = held.user | _of_replica(held, user, model.process)
    if optimizer is not None:
        _check_optimizer(plan, optimizer, held)
    with files.reading(path):
        for name, own in user.items():
            if isinstance(own, LRScheduler):  # which takes whatever it is given
                if not isinstance(given[name], dict):
                    raise Misfit(f"is {shown(given[name])} and must be an object", _at("user", name))
                _check_options(given[name], own.state_dict(), (), _at("user", name))
    if record.seed != plan.step.seed:
        warnings.warn(
            f"{path} is of a run with seed {record.seed}, and this pipeline was compiled with "
            f"{plan.step.seed}: random ops draw other numbers than that run would have.",
            stacklevel=4,
        )
    with files.reading(path):
        names = model.stored_by(rank).state
        read = tensor_store.read(
            held.tensors, [(MODEL + name.tensor, model.spans_of(name)) for name in names]
        )
        values = dict(zip(names, read, strict=True))
        state = {} if optimizer is None else _optimizer_state(model, optimizer, held, values)
        averages = {
            key: _averages(key, own.average, model, held)
            for key, own in user.items()
            if isinstance(own, OfAverage)
        }
    return RankState(path, record.step_number, record.run, values, state, given, averages)


def _averages(
    key: str, own: Average, model: ModelState, held: CheckpointFiles
) -> dict[ShardName, torch.Tensor]:
    """Raises Misfit where the checkpoint lacks an average, or has another one."""
    for name, value in own.values.items():
        kind = TensorKind(model.plan.whole_layout(name.tensor).shape, str(value.dtype))
        stored = held.tensors.get(averaged(key, name.tensor))
        if stored is None or TensorKind(stored.shape, str(stored.dtype)) != kind:
            there = "none" if stored is None else f"{stored.dtype} of shape {stored.shape}"
            raise Misfit(
                f"has {there}, and {kind.dtype} of shape {kind.shape} here", averaged(key, name.tensor)
            )
    read = tensor_store.read(
        held.tensors, [(averaged(key, name.tensor), model.spans_of(name)) for name in own.values]
    )
    return dict(zip(own.values, read, strict=True))


def restore(
    model: ModelState, optimizer: PipelineOptimizer | None, user: Mapping[str, Stateful], contents: RankState
) -> None:
    """Give a rank its contents.  All ranks must call it.

    Raises ArtifactError on all of them, and nothing has changed, if an object of one does not take its state.
    """
    undo: list[Callable[[], Any]] = []
    try:
        with agreed(model.process, f"resume from {contents.path}"):
            if optimizer is not None:
                _give(optimizer, contents.optimizer, "the optimizer", contents.path, undo)
            for name, own in user.items():
                _give(own, contents.user[name], f"state[{name!r}]", contents.path, undo)
    except Exception:
        for back in reversed(undo):
            with contextlib.suppress(
                Exception
            ):  # of the object that failed, as the error that is raised says
                back()
        raise
    for key, averages in contents.averages.items():
        for name, value in averages.items():
            user[key].average.values[name].copy_(value)  # type: ignore[attr-defined]
    for name, value in contents.values.items():
        with torch.no_grad(), model.filling(name) as target:
            target.copy_(value)
    model.changed()
    model.run = contents.run


def _give(own: Stateful, state: Any, what: str, path: Path, undo: list[Callable[[], Any]]) -> None:
    undo.append(partial(own.load_state_dict, copy.deepcopy(own.state_dict())))
    try:
        own.load_state_dict(state)
    except Exception as error:
        raise ArtifactError(
            f"{path / files.STATE}: {what} ({type(own).__name__}) does not take its state: {in_short(error)}"
        ) from error


def _at(field: str, *keys: str | int) -> str:
    return f"{files.STATE}: {field}" + "".join(f"[{key!r}]" for key in keys)


def _of_replica(held: CheckpointFiles, user: Collection[str], process: Process | None) -> dict[str, Any]:
    """The states that each replica has its own of, by name.  Raises ArtifactError for other replicas."""
    replica, replicas = (0, 1) if process is None else (process.replica, process.replicas)
    found = {name: states for name, states in held.by_replica.items() if name in user}
    for name, states in found.items():
        if len(states) != replicas:
            raise ArtifactError(
                f"{held.path} holds another state {name!r} for each of {number_of(len(states), 'replica')}, "
                f"and this run has {replicas}. Start as many replicas, or leave {name!r} out of state=."
            )
    return {name: states[replica] for name, states in found.items()}


def _plain(given: Any, tensors: Mapping[str, torch.Tensor], at: str) -> Any:
    try:
        return from_json(given, tensors)
    except Misfit as error:
        raise Misfit(str(error), at) from error


def _decoded(name: str, given: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    found = _plain(given, {} if name == "fields" else tensors, _at(name))
    objects = {"groups": found, "fields": [found, *_values(found)], "user": [found]}[name]
    if not isinstance(objects, list) or not all(
        isinstance(entry, dict) and all(isinstance(key, str) for key in entry) for entry in objects
    ):
        wanted = {"groups": "a list of objects", "fields": "an object of objects", "user": "an object"}[name]
        raise Misfit(f"is {shown(found)} and must be {wanted}", _at(name))
    return found


def _values(found: Any) -> list[Any]:
    return [*found.values()] if isinstance(found, dict) else []


def _check_kinds(expected: Mapping[str, TensorKind], tensors: Mapping[str, Stored]) -> None:
    """The tensors in the files must be those of state.json."""
    for name in sorted(expected.keys() | tensors.keys()) if expected else ():
        there = TensorKind(tensors[name].shape, str(tensors[name].dtype)) if name in tensors else None
        wanted = expected.get(name)
        if there != wanted:
            listed = (
                "lists no such tensor" if wanted is None else f"lists {wanted.dtype} of shape {wanted.shape}"
            )
            found = (
                "no file holds it"
                if there is None
                else f"its file holds {there.dtype} of shape {there.shape}"
            )
            raise Misfit(f"{listed}, and {found}", _at("tensors", name))


def _check_model(plan: Plan, held: CheckpointFiles) -> None:
    names = {name.tensor for tensors in plan.tensors for name in tensors.state}
    found = {name.removeprefix(MODEL) for name in held.tensors if name.startswith(MODEL)}
    for name in sorted(names | found):
        layout = plan.whole_layout(name) if name in names else None
        here = None if layout is None else TensorKind(layout.shape, layout.dtype)
        stored = held.tensors[MODEL + name] if name in found else None
        there = None if stored is None else TensorKind(stored.shape, str(stored.dtype))
        if here != there:
            own = "no such tensor" if here is None else f"shape {here.shape} and {here.dtype}"
            other = "does not hold it" if there is None else f"has shape {there.shape} and {there.dtype}"
            raise ArtifactError(
                f"{held.path} is of another model: {name} has {own} in this one, and the checkpoint {other}."
            )


def _check_optimizer(plan: Plan, optimizer: PipelineOptimizer, held: CheckpointFiles) -> None:
    """Class, groups and names must be those of the optimizer; its state of a parameter, it alone knows."""
    path, groups = held.path, optimizer.param_groups
    if held.record.optimizer != class_of(optimizer):
        raise ArtifactError(
            f"{path} has the state of {held.record.optimizer or 'no optimizer'}, and this run has "
            f"{class_of(optimizer)}. Make the same optimizer, or resume without one."
        )
    if len(held.groups) != len(groups):
        raise ArtifactError(
            f"{path} has the state of an optimizer with {number_of(len(held.groups), 'group')}, and this one "
            f"has {len(groups)}. Make it with the same groups."
        )
    trained = {name.tensor for tensors in plan.tensors for name in tensors.gradients}
    with files.reading(path):
        for k, (given, own) in enumerate(zip(held.groups, groups, strict=True)):
            kind = optimizer.of_groups[k]
            for key in kind.defaults:
                if key not in given:
                    raise Misfit(f"lacks {shown(key)}", _at("groups", k))
            _check_options(given, own, _optional(kind), _at("groups", k))
            _check_update(optimizer, type(kind), given, own, held, _at("groups", k))
        for name in sorted(held.state.keys() | held.fields.keys()):
            if name not in trained:
                raise Misfit(f"holds the optimizer's state of {shown(name)}, which it does not train")
            steps = held.fields.get(name, {}).get(STEP, 0)
            if not _is_count(steps):
                raise Misfit(f"is {shown(steps)}, which is no number of steps", _at("fields", name, STEP))


def _optional(optimizer: Optimizer) -> set[str]:
    """The options that may be None."""
    parameters = inspect.signature(type(optimizer)).parameters.values()
    return {parameter.name for parameter in parameters if parameter.default is None}


def _check_options(
    given: Mapping[str, Any], here: Mapping[str, Any], optional: Collection[str], at: str
) -> None:
    """Raise Misfit for a value that cannot take the place of the one that is here."""
    for key in given.keys() & here.keys():
        left_out = given[key] is None and key in optional
        if not left_out and not _fits(given[key], here[key]):
            raise Misfit(f"is {shown(given[key])}, and {shown(here[key])} here", f"{at}[{key!r}]")


def _check_update(
    optimizer: PipelineOptimizer,
    kind: type[Optimizer],
    given: Mapping[str, Any],
    own: Mapping[str, Any],
    held: CheckpointFiles,
    at: str,
) -> None:
    """Raise Misfit for options of a group that the optimizer refuses, or with which it cannot update."""
    like = own["params"][0].detach() if own["params"] else torch.zeros(2, 2)
    try:
        entries = _entries_of_update(kind, own, like)
    except Exception:  # noqa: BLE001 - a class of the user's, whose updates need more than a small parameter
        return
    try:
        entries = _entries_of_update(kind, given, like) - entries
    except Exception as error:
        raise Misfit(f"has options that {kind.__name__} fails with: {error!r}", at) from error
    for name in {ShardName(optimizer.names[p]).tensor for p in own["params"]} if entries else ():
        there = {*held.state.get(name, ()), *held.fields.get(name, ())}
        if there and (missing := sorted(entries - there)):
            raise Misfit(f"has options that need {shown(missing[0])}, which the state of {name} lacks", at)


def _entries_of_update(kind: type[Any], group: Mapping[str, Any], like: torch.Tensor) -> set[str]:
    """What an optimizer with the options of a group keeps of a small parameter after an update."""
    parameter = torch.nn.Parameter(like.new_zeros([min(2, length) for length in like.shape]))
    parameter.grad = torch.zeros_like(parameter)
    options = {key: value for key, value in group.items() if key != "params"}
    known = {key: options[key] for key in inspect.signature(kind).parameters if key in options}
    trial = kind([{"params": [parameter], **options}], **known)
    trial.step()
    return {*trial.state[parameter]}


def _fits(given: Any, here: Any) -> bool:
    """Whether a value is of the kind of another, and finite if that is."""
    if here is None:
        return True
    if isinstance(here, bool) or isinstance(given, bool):
        return isinstance(here, bool) and isinstance(given, bool)
    if isinstance(here, (list, tuple)):
        fits = isinstance(given, (list, tuple)) and len(given) == len(here)
        return fits and all(_fits(a, b) for a, b in zip(given, here, strict=True))
    if isinstance(here, (int, float, torch.Tensor)):
        return isinstance(given, (int, float, torch.Tensor)) and (_is_finite(given) or not _is_finite(here))
    return isinstance(given, type(here))


def _is_finite(value: float | torch.Tensor) -> bool:
    return bool(value.isfinite().all()) if isinstance(value, torch.Tensor) else isfinite(value)


def _is_count(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 and not value.is_complex() else None
    return isinstance(value, (int, float)) and isfinite(value) and value >= 0 and value == int(value)


def _optimizer_state(
    model: ModelState,
    optimizer: PipelineOptimizer,
    held: CheckpointFiles,
    values: Mapping[ShardName, torch.Tensor],
) -> dict[str, Any]:
    """The state of this rank's parameters as ``load_state_dict`` takes it.  Raises Misfit for values of
    another form than the optimizer's."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = [ShardName(optimizer.names[parameter]) for parameter in parameters]
    entries: list[tuple[int, str]] = []
    wanted: list[tuple[str, Spans]] = []
    for k, name in enumerate(names):
        for entry in held.state.get(name.tensor, ()):
            entries.append((k, entry))
            wanted.append((f"{OPTIMIZER}{name.tensor}.{entry}", model.spans_of(name)))
    state = {k: dict(own) for k, name in enumerate(names) if (own := held.fields.get(name.tensor))}
    for (k, entry), value in zip(entries, tensor_store.read(held.tensors, wanted), strict=True):
        at = f"{OPTIMIZER}{names[k].tensor}.{entry}"
        if entry == STEP and not _is_count(value):
            raise Misfit(f"is {shown(value.tolist())}, which is no number of steps", at)
        if entry == MASTER and value.shape != parameters[k].shape:
            raise Misfit(
                f"has shape {tuple(value.shape)}, and the parameter {tuple(parameters[k].shape)}", at
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
            for options, group in zip(held.groups, optimizer.param_groups, strict=True)
        ],
    }


def _value_of(name: ShardName, values: Mapping[ShardName, torch.Tensor]) -> torch.Tensor:
    """The value of a parameter, or of rows of one that this process has, or of which it has more rows."""
    if name in values:
        return values[name]
    held = next(other for other in values if other.contains(name))
    return values[held][name.begin - held.begin : name.end - held.begin]
