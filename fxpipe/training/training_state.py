"""All that a training run is: parameters, buffers, the optimizer's state, the step's number, the user's
state.

By the model's names, so that another number of ranks or another schedule can take it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from fxpipe.errors import ArtifactError, RunError
from fxpipe.plan.artifact import Plan
from fxpipe.strict import Misfit, parse_json, structure
from fxpipe.training import tensor_store
from fxpipe.training.model_state import ModelState
from fxpipe.training.optimizer import PipelineOptimizer
from fxpipe.training.plain import from_json, to_json
from fxpipe.training.tensor_store import Part
from fxpipe.version import __version__
from fxpipe.vocabulary.rows import rows_of, whole_name

FORMAT = 1
MODEL, OPTIMIZER, GROUPS, USER = "model.", "optimizer.", "groups.", "user."  # names of tensors begin so


@runtime_checkable
class Stateful(Protocol):
    """A scheduler, a loader, a sampler, …"""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


@dataclass(frozen=True)
class Record:
    """What a checkpoint holds beside tensors; state.json is this and nothing else.

    ``optimizer``: the name of its class; None if there is none.
    ``groups``: the options of the optimizer's groups.  ``fields``: parameter -> its state that is no tensor.
    ``user``: the user's state by name.  These three are as :mod:`fxpipe.training.plain` gives them.
    """

    format: int
    version: str
    model: str
    step_number: int
    seed: int
    optimizer: str | None
    groups: Any
    fields: Any
    user: Any

    def decoded(self, tensors: Mapping[str, torch.Tensor], path: Path) -> tuple[Any, Any, Any]:
        """``groups``, ``fields`` and ``user`` as they were.  Raises ArtifactError, naming ``path``."""
        try:
            groups, fields, user = (from_json(x, tensors) for x in (self.groups, self.fields, self.user))
        except Misfit as error:
            raise ArtifactError(f"{path}: state.json {error}.") from error
        return groups, fields, user

    @staticmethod
    def from_json(text: str, path: Path) -> Record:
        """Raises ArtifactError for a text that is no record of this format."""
        try:
            record = structure(parse_json(text), Record)
        except Misfit as error:
            raise ArtifactError(f"{path}: state.json {error}.") from error
        if record.format != FORMAT:
            raise ArtifactError(
                f"{path} has format {record.format} and fxpipe {__version__} reads format {FORMAT}. Read it "
                f"with fxpipe {record.version}."
            )
        return record


def tensors_of(
    state: ModelState, optimizer: PipelineOptimizer | None, rank: int
) -> dict[str, torch.Tensor | Part]:
    """The tensors that a rank holds, by their names in a checkpoint."""
    plan = state.plan
    found = {
        MODEL + whole_name(name): _part(plan, name, state.held(name)) for name in plan.tensors[rank].state
    }
    for name, fields in _state_of(optimizer):
        for key, value in fields.items():
            if not isinstance(key, str) or "." in key:
                raise RunError(
                    f"The optimizer's state of {name} has the key {key!r}, by which a checkpoint cannot name "
                    "a tensor. Checkpoints need keys that are texts without a dot."
                )
            if isinstance(value, torch.Tensor):
                found[f"{OPTIMIZER}{whole_name(name)}.{key}"] = _part(plan, name, value)
    return found


def _class_of(optimizer: PipelineOptimizer | None) -> str | None:
    return None if optimizer is None else type(optimizer.optimizer).__name__


def _part(plan: Plan, name: str, tensor: torch.Tensor) -> torch.Tensor | Part:
    """A parameter, or a tensor of the optimizer's state of it, as a part of the whole one if it has a row for
    each row held here."""
    rows = rows_of(name)
    if rows is None or tensor.shape[:1] != (rows.end - rows.begin,):
        return tensor
    return Part(tensor, rows.begin, plan.layouts[rows.table].shape[0])


def _state_of(optimizer: PipelineOptimizer | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names of this rank's parameters, or of their rows, with the optimizer's state of each."""
    if optimizer is not None:
        shared = [key for key in optimizer.state if key not in optimizer.names]
        if shared:
            raise RunError(
                f"The optimizer has a state {shared[0]!r:.60} that belongs to no parameter, and a checkpoint "
                "has no place for it."
            )
        for updated, name in optimizer.names.items():
            yield name, optimizer.state_of(updated)


def _plain_fields(optimizer: PipelineOptimizer | None) -> dict[str, dict[str, Any]]:
    """The state of this rank's parameters that is no tensor: numbers, mostly."""
    found = {}
    for name, fields in _state_of(optimizer):
        plain = {key: value for key, value in fields.items() if not isinstance(value, torch.Tensor)}
        if plain:
            found[whole_name(name)] = plain
    return found


def record_of(
    state: ModelState,
    optimizer: PipelineOptimizer | None,
    step_number: int,
    user: Mapping[str, Stateful],
    tensors: dict[str, Any],
) -> Record:
    """The record, with the fields of this rank's parameters.  tensors: gets those of the groups and the
    user."""
    groups = [] if optimizer is None else optimizer.param_groups
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return Record(
        format=FORMAT,
        version=__version__,
        model=state.plan.model,
        step_number=step_number,
        seed=state.plan.step.seed,
        optimizer=_class_of(optimizer),
        groups=to_json(options, tensors, GROUPS, "the optimizer's groups"),
        fields=to_json(_plain_fields(optimizer), None, "", "the optimizer's state"),
        user=to_json({name: own.state_dict() for name, own in user.items()}, tensors, USER, "state"),
    )


@dataclass(frozen=True, eq=False)
class Contents:
    """A checkpoint that fits a pipeline: its record decoded, and the shapes and dtypes of its tensors."""

    path: Path
    groups: list[dict[str, Any]]
    fields: dict[str, dict[str, Any]]
    user: dict[str, Any]
    stored: Mapping[str, tuple[torch.Size, torch.dtype]]


def contents_for(
    plan: Plan, optimizer: PipelineOptimizer | None, user: Mapping[str, Stateful], path: Path, record: Record
) -> Contents:
    """Read a checkpoint, but for the tensors of the model and the optimizer.

    Raises ArtifactError where it is not of this model or lacks the state of the optimizer or the user.
    """
    stored = tensor_store.stored(path)
    extra = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in stored.items()
        if name.startswith((GROUPS, USER))
    }
    tensor_store.read(extra, path)
    groups, fields, given = record.decoded(extra, path)
    _check_model(plan, stored, path)
    for name in user:
        if name not in given:
            raise ArtifactError(
                f"{path} holds no state {name!r}; it holds {', '.join(sorted(given)) or 'none'}."
            )
    if optimizer is not None and record.optimizer != _class_of(optimizer):
        raise ArtifactError(
            f"{path} has the state of {record.optimizer or 'no optimizer'}, and this run has "
            f"{_class_of(optimizer)}. Make the same optimizer, or resume without one."
        )
    if optimizer is not None and len(groups) != len(optimizer.param_groups):
        raise ArtifactError(
            f"{path} has the state of an optimizer with {len(groups)} groups, and this one has "
            f"{len(optimizer.param_groups)}. Make it with the same groups."
        )
    if record.seed != plan.step.seed:
        warnings.warn(
            f"{path} is of a run with seed {record.seed}, and this pipeline was compiled with "
            f"{plan.step.seed}: random ops draw other numbers than that run would have.",
            stacklevel=4,
        )
    return Contents(path, groups, fields, given, stored)


def restore(
    state: ModelState,
    optimizer: PipelineOptimizer | None,
    user: Mapping[str, Stateful],
    contents: Contents,
    rank: int,
) -> None:
    """Fill the tensors that a rank holds, the optimizer, and the user's objects."""
    state.follow_model()
    tensor_store.read(tensors_of(state, None, rank), contents.path)
    state.changed()
    if optimizer is not None:
        _restore_optimizer(state.plan, optimizer, contents)
    for name, own in user.items():
        own.load_state_dict(contents.user[name])


def _check_model(plan: Plan, stored: Mapping[str, tuple[torch.Size, torch.dtype]], path: Path) -> None:
    names = {whole_name(name) for held in plan.tensors for name in held.state}
    found = {name.removeprefix(MODEL) for name in stored if name.startswith(MODEL)}
    for name in sorted(names | found):
        shape = plan.layouts[name].shape if name in names else None
        there = tuple(stored[MODEL + name][0]) if name in found else None
        if shape != there:
            here = "no such tensor" if shape is None else f"shape {shape}"
            other = "does not hold it" if there is None else f"has shape {there}"
            raise ArtifactError(
                f"{path} is of another model: {name} has {here} in this one, and the checkpoint {other}."
            )


def _restore_optimizer(plan: Plan, optimizer: PipelineOptimizer, contents: Contents) -> None:
    by_parameter: dict[str, list[str]] = {}
    for key in contents.stored:
        if key.startswith(OPTIMIZER):
            name, _, field = key.removeprefix(OPTIMIZER).rpartition(".")
            by_parameter.setdefault(name, []).append(field)
    state: dict[int, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor | Part] = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for k, parameter in enumerate(parameters):
        held = optimizer.names[parameter]
        name, rows = whole_name(held), rows_of(held)
        own = dict(contents.fields.get(name, {}))
        for field in by_parameter.get(name, ()):
            key = f"{OPTIMIZER}{name}.{field}"
            shape, dtype = contents.stored[key]
            if rows and shape[:1] == plan.layouts[name].shape[:1]:
                shape = torch.Size([rows.end - rows.begin, *shape[1:]])
            own[field] = torch.empty(shape, dtype=dtype)
            tensors[key] = _part(plan, held, own[field])
        if own:
            state[k] = own
    tensor_store.read(tensors, contents.path)
    numbers = iter(range(len(parameters)))
    optimizer.load_state_dict(
        {
            "state": state,
            "param_groups": [
                {**options, "params": [next(numbers) for _ in group["params"]]}
                for options, group in zip(contents.groups, optimizer.param_groups, strict=True)
            ],
        }
    )
