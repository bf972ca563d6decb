"""A checkpoint as plain tensors, without a pipeline: for eager, for export, to look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import ArtifactError
from fxpipe.plan.saved.files import as_path
from fxpipe.runtime.job.tracebacks import brief
from fxpipe.training.checkpoint import files, tensor_store
from fxpipe.training.checkpoint.checkpoint_files import checkpoint_files
from fxpipe.training.checkpoint.training_state import MODEL, OPTIMIZER, CheckpointRecord, averaged
from fxpipe.training.weights.dcp_metadata import METADATA


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint in memory.  ``model``: the model's state dict, a tensor with two names under both, without
    buffers that are not persistent.  ``optimizer``: parameter -> the optimizer's state of it.  ``groups``:
    the options of the optimizer's groups.  ``state``: the user's state by name, of replica 0 where replicas
    have different ones.  ``averages``: the averages of weights in it, by the same names: parameter ->
    average."""

    step_number: int
    model: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    state: dict[str, Any]
    averages: dict[str, dict[str, torch.Tensor]]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state dict for ``load_state_dict`` of the model in eager PyTorch, which may be strict."""
        return dict(self.model)


@brief
def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint: a directory ``step-00000500``, or the newest of a directory of checkpoints.

    ``model.load_state_dict(read_checkpoint(path).state_dict())`` gives its weights to a model; with
    ``strict=False`` of a checkpoint of an earlier version, where tensors have two names or buffers are not
    persistent.
    Raises ArtifactError, naming the file, if there is none or it is damaged.
    """
    path = as_path(path, "fxpipe.read_checkpoint")
    if not (path / files.SUMS).exists():
        newest = files.newest(path) if path.is_dir() else None
        if newest is None:
            saved = " It is a saved pipeline: fxpipe.load." if (path / "plan.json").exists() else ""
            if (path / METADATA).exists():
                saved = " It is one of torch.distributed.checkpoint: pipe.load_state_dict(path) reads it."
            raise ArtifactError(f"{path} holds no checkpoint of fxpipe.{saved}")
        path = newest
    files.verify(path, files.read_sums(path))
    checkpoint = checkpoint_files(path, CheckpointRecord.from_json(files.read_state(path), path))
    with files.reading(path):
        read = tensor_store.read(checkpoint.tensors, [(name, {}) for name in checkpoint.tensors])
    tensors = dict(zip(checkpoint.tensors, read, strict=True))
    optimizer: dict[str, dict[str, Any]] = {name: dict(fields) for name, fields in checkpoint.fields.items()}
    for name, entries in checkpoint.state.items():
        optimizer.setdefault(name, {}).update({e: tensors[f"{OPTIMIZER}{name}.{e}"] for e in entries})
    stored = [key.removeprefix(MODEL) for key in tensors if key.startswith(MODEL)]
    names = checkpoint.record.names or [(name, name) for name in stored]
    model = {name: tensors[MODEL + tensor] for name, tensor in names}
    averages: dict[str, dict[str, torch.Tensor]] = {}
    for key in checkpoint.user:
        begin = averaged(key, "")
        averages[key] = {n.removeprefix(begin): t for n, t in tensors.items() if n.startswith(begin)}
    averages = {key: values for key, values in averages.items() if values}
    step = checkpoint.record.step_number
    return Checkpoint(step, model, optimizer, checkpoint.groups, checkpoint.user, averages)
