"""A checkpoint as plain tensors, without a pipeline: for eager, for export, to look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import ArtifactError
from fxpipe.training import checkpoint_files as files
from fxpipe.training import tensor_store
from fxpipe.training.training_state import MODEL, OPTIMIZER, Record


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """``model``: parameters and buffers by the model's names; of a tensor with two names, one.
    ``optimizer``: parameter -> the optimizer's state of it.  ``groups``: the options of the optimizer's
    groups.  ``state``: the user's state by name."""

    step_number: int
    model: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    state: dict[str, Any]


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint: a directory ``step-00000500``, or the newest of a directory of checkpoints.

    ``model.load_state_dict(read_checkpoint(path).model, strict=False)`` gives its weights to a model;
    strictly, where no tensor has two names and all buffers are persistent.  Raises ArtifactError, naming the
    file, if there is none or it is damaged.
    """
    path = Path(path)
    if not (path / files.SUMS).exists():
        found = files.newest(path) if path.is_dir() else None
        if found is None:
            raise ArtifactError(f"{path} holds no checkpoint.")
        path = found
    files.verify(path, files.read_sums(path))
    record = Record.from_json(files.read_state(path), path)
    tensors = {n: torch.empty(shape, dtype=dtype) for n, (shape, dtype) in tensor_store.stored(path).items()}
    tensor_store.read(tensors, path)
    groups, fields, state = record.decoded(tensors, path)
    optimizer: dict[str, dict[str, Any]] = {name: dict(own) for name, own in fields.items()}
    for key, tensor in tensors.items():
        if key.startswith(OPTIMIZER):
            name, _, field = key.removeprefix(OPTIMIZER).rpartition(".")
            optimizer.setdefault(name, {})[field] = tensor
    model = {key.removeprefix(MODEL): t for key, t in tensors.items() if key.startswith(MODEL)}
    return Checkpoint(record.step_number, model, optimizer, groups, state)
