"""The state of a training run: parameters, buffers, the optimizer's and the user's state, the step's number.

It stands under the model's names, so that another number of ranks or another schedule can take it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import ArtifactError, RunError
from fxpipe.plan.rows import ShardName
from fxpipe.plan.spans import without_zeros
from fxpipe.plan.version import __version__
from fxpipe.strict import Mismatch, parse_json, structure, unstructure
from fxpipe.training.checkpoint import files
from fxpipe.training.checkpoint.plain import to_json
from fxpipe.training.checkpoint.tensor_store import Part
from fxpipe.training.model.model_state import ModelState
from fxpipe.training.optimizer.average import OfAverage
from fxpipe.training.optimizer.optimizer import PipelineOptimizer
from fxpipe.training.weights.area import InFile, Stored

FORMAT = 1
# The names of tensors begin with what they are of.
MODEL, OPTIMIZER, AVERAGE, GROUPS, USER = "model.", "optimizer.", "average.", "groups.", "user."


@dataclass(frozen=True)
class UserState:
    """The user's state as ``plain.py`` gives it, by name.  ``first``: of rank 0.  ``by_replica``: of each
    replica, in order, where it is not the same for all.  ``tensors``: those that this process writes."""

    first: dict[str, Any] = field(default_factory=dict)
    by_replica: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorKind:
    """The shape and dtype of a tensor, whose ``dtype`` is text: "torch.float32"."""

    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(tensor: torch.Tensor | Stored[InFile]) -> TensorKind:
        return TensorKind(tuple(tensor.shape), str(tensor.dtype))

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


@dataclass(frozen=True)
class CheckpointRecord:
    """The part of a checkpoint beside its tensors; state.json is this and nothing else.

    ``optimizer``: the name of its class; None if there is none.
    ``groups``: the options of the optimizer's groups.  ``fields``: parameter -> its state that is no tensor.
    ``user``: the user's state by name, on rank 0.  These three are as ``plain.py`` gives them.
    ``tensors``: those in the files; ``run``: a name of the run; ``by_replica``: the user's state of each
    replica, by name, where these differ; ``names``: those of a state dict of the model, each with the name of
    its tensor, as in the plan.  Checkpoints of earlier versions lack these four.
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
    tensors: dict[str, TensorKind] = field(default_factory=dict)
    run: str = ""
    by_replica: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    names: tuple[tuple[str, str], ...] = ()

    def as_json(self) -> str:
        return json.dumps(unstructure(self), indent=1)

    @staticmethod
    def from_json(text: str, path: Path) -> CheckpointRecord:
        """Raises ArtifactError for a text that is no record of this format."""
        with files.reading(path):
            try:
                record = structure(parse_json(text), CheckpointRecord)
            except Mismatch as error:
                raise Mismatch(str(error), files.STATE) from error
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
    tensors = {
        MODEL + name.tensor: part_of(state, name, state.value(name)) for name in state.owned_by(rank).state
    }
    for name, fields in _state_of(optimizer):
        for key, value in fields.items():
            if not isinstance(key, str) or "." in key:
                raise RunError(
                    f"The optimizer's state of {name} has the key {key!r}, by which a checkpoint cannot name "
                    "a tensor. Checkpoints need keys that are texts without a dot."
                )
            if hasattr(type(value), "__tensor_flatten__"):
                raise RunError(
                    f"{class_of(optimizer)} keeps {key!r} of {name} as a {type(value).__name__}, which is "
                    "made of other tensors, and a checkpoint holds plain ones. Save optimizer.state_dict() "
                    "of each rank by torch.save, and the model by a Checkpointer without optimizer=."
                )
            if isinstance(value, torch.Tensor):
                tensors[f"{OPTIMIZER}{name.tensor}.{key}"] = part_of(state, name, value)
    return tensors


def averages_of(state: ModelState, user: Mapping[str, object]) -> dict[str, torch.Tensor | Part]:
    """The averages of weights that are among the user's state, by their names in a checkpoint."""
    return {
        averaged(key, name.tensor): part_of(state, name, value)
        for key, thing in user.items()
        if isinstance(thing, OfAverage)
        for name, value in thing.average.values.items()
    }


def averaged(key: str, name: str) -> str:
    """The name in a checkpoint of a tensor of an average.  key: of the user's state."""
    return f"{AVERAGE}{key}.{name}"


def class_of(optimizer: PipelineOptimizer | None) -> str | None:
    return None if optimizer is None else optimizer.kind


def part_of(state: ModelState, name: ShardName, tensor: torch.Tensor) -> torch.Tensor | Part:
    """A parameter, or a tensor of the optimizer's state of it, as a part of the whole one, along each
    dimension of which this process has a part and the tensor is as long."""
    spans = state.spans_of(name)
    tensor = without_zeros(tensor, spans)
    fitting = {dim: span for dim, span in spans.items() if tensor.shape[dim : dim + 1] == (span.length,)}
    offsets = [fitting[dim].begin if dim in fitting else 0 for dim in range(tensor.dim())]
    whole = [fitting[dim].whole if dim in fitting else length for dim, length in enumerate(tensor.shape)]
    return Part(tensor, torch.Size(offsets), torch.Size(whole)) if fitting else tensor


def _state_of(optimizer: PipelineOptimizer | None) -> Iterator[tuple[ShardName, dict[str, object]]]:
    """The names of this rank's parameters, or of their rows, with the optimizer's state of each."""
    if optimizer is not None:
        shared = [key for key in optimizer.state if key not in optimizer.names]
        if shared:
            raise RunError(
                f"The optimizer has a state {shared[0]!r:.60} that belongs to no parameter, and a checkpoint "
                "has no place for it."
            )
        for updated, name in optimizer.names.items():
            yield ShardName(name), optimizer.state_of(updated)


def _plain_fields(optimizer: PipelineOptimizer | None) -> dict[str, dict[str, object]]:
    """The state of this rank's parameters that is no tensor: numbers, mostly."""
    fields_by_name = {}
    for name, fields in _state_of(optimizer):
        plain = {key: value for key, value in fields.items() if not isinstance(value, torch.Tensor)}
        if plain:
            fields_by_name[name.tensor] = plain
    return fields_by_name


def record_of(
    state: ModelState,
    optimizer: PipelineOptimizer | None,
    step_number: int,
    user: UserState,
    tensors: dict[str, Any],
) -> CheckpointRecord:
    """The record, with the fields of this rank's parameters.  tensors: gets those of groups and user."""
    tensors |= user.tensors
    groups = [] if optimizer is None else optimizer.param_groups
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return CheckpointRecord(
        format=FORMAT,
        version=__version__,
        model=state.plan.model,
        step_number=step_number,
        seed=state.plan.step.seed,
        optimizer=class_of(optimizer),
        groups=to_json(options, tensors, GROUPS, "the optimizer's groups"),
        fields=to_json(_plain_fields(optimizer), None, "", "the optimizer's state"),
        user={"dict": user.first},
        run=state.run,
        by_replica=user.by_replica,
        names=state.plan.state,
    )


def kinds_of(tensors: Mapping[str, torch.Tensor | Part]) -> Any:
    """The kinds of the whole tensors that a rank holds, or holds a part of, as plain data."""
    kinds = {
        name: TensorKind(tuple(t.whole), str(t.tensor.dtype)) if isinstance(t, Part) else TensorKind.of(t)
        for name, t in tensors.items()
    }
    return unstructure(kinds)


def kinds_from(plain: Any) -> dict[str, TensorKind]:
    return structure(plain, dict[str, TensorKind])
