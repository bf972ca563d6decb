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
    """``model``: the model's state dict, a tensor with two names under both, without buffers that are not
    persistent.  ``optimizer``: parameter -> the optimizer's state of it.  ``groups``: the options of the
    optimizer's groups.  ``state``: the user's state by name, of replica 0 where replicas have different
    ones.  ``averages``: the averages of weights in it, by the same names: parameter -> average."""

    step_number: int
    model: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    state: dict[str, Any]
    averages: dict[str, dict[str, torch.Tensor]]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """For ``load_state_dict`` of the model in eager PyTorch, which may be strict."""
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
        found = files.newest(path) if path.is_dir() else None
        if found is None:
            saved = " It is a saved pipeline: fxpipe.load." if (path / "plan.json").exists() else ""
            if (path / METADATA).exists():
                saved = " It is one of torch.distributed.checkpoint: pipe.load_state_dict(path) reads it."
            raise ArtifactError(f"{path} holds no checkpoint of fxpipe.{saved}")
        path = found
    files.verify(path, files.read_sums(path))
    held = checkpoint_files(path, CheckpointRecord.from_json(files.read_state(path), path))
    with files.reading(path):
        read = tensor_store.read(held.tensors, [(name, {}) for name in held.tensors])
    tensors = dict(zip(held.tensors, read, strict=True))
    optimizer: dict[str, dict[str, Any]] = {name: dict(own) for name, own in held.fields.items()}
    for name, entries in held.state.items():
        optimizer.setdefault(name, {}).update({e: tensors[f"{OPTIMIZER}{name}.{e}"] for e in entries})
    names = held.record.names or [(name, name) for key in tensors if (name := key.removeprefix(MODEL)) != key]
    model = {name: tensors[MODEL + tensor] for name, tensor in names}
    averages: dict[str, dict[str, torch.Tensor]] = {}
    for key in held.user:
        begin = averaged(key, "")
        averages[key] = {n.removeprefix(begin): t for n, t in tensors.items() if n.startswith(begin)}
    averages = {key: values for key, values in averages.items() if values}
    return Checkpoint(held.record.step_number, model, optimizer, held.groups, held.user, averages)
