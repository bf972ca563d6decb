"""Reads the files of a checkpoint, which must fit each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxpipe.strict import Mismatch, shown
from fxpipe.training.checkpoint import files, tensor_store
from fxpipe.training.checkpoint.plain import from_json
from fxpipe.training.checkpoint.training_state import (
    GROUPS,
    MODEL,
    OPTIMIZER,
    USER,
    CheckpointRecord,
    TensorKind,
)
from fxpipe.training.weights.area import InFile, Stored


@dataclass(frozen=True, eq=False)
class CheckpointFiles:
    """A checkpoint whose files fit each other: its record decoded, and where its tensors are.

    ``state``: parameter -> the names of the tensors of the optimizer's state of it.
    """

    path: Path
    record: CheckpointRecord
    groups: list[dict[str, object]]
    fields: dict[str, dict[str, object]]
    user: dict[str, Any]
    by_replica: dict[str, tuple[object, ...]]
    tensors: Mapping[str, Stored[InFile]]
    state: Mapping[str, list[str]]


def checkpoint_files(path: Path, record: CheckpointRecord) -> CheckpointFiles:
    """Raises ArtifactError, naming file and field, where the files of a checkpoint contradict each other."""
    with files.reading(path):
        step = files.step_of(path)
        if step not in (None, record.step_number):
            raise Mismatch(
                f"is {record.step_number}, in the checkpoint of step {step}", f"{files.STATE}: step_number"
            )
        names = [name for name in files.read_sums(path) if name.endswith(".safetensors")]
        tensors = tensor_store.stored(path, names)
        _check_kinds(record.tensors, tensors)
        for _, tensor in record.names:
            if MODEL + tensor not in tensors:
                raise Mismatch(f"has the name {shown(tensor)}, and no file holds it", f"{files.STATE}: names")
        inside = [name for name in tensors if name.startswith((GROUPS, USER))]
        read = tensor_store.read(tensors, [(name, {}) for name in inside])
        extra = dict(zip(inside, read, strict=True))
        groups, fields, user = (
            _decoded(name, encoded, extra)
            for name, encoded in (("groups", record.groups), ("fields", record.fields), ("user", record.user))
        )
        by_replica = {
            name: tuple(_plain(entries, extra, at("by_replica", name, k)) for k, entries in enumerate(states))
            for name, states in record.by_replica.items()
        }
        state: dict[str, list[str]] = {}
        for key in tensors:
            if key.startswith(OPTIMIZER):
                name, _, entry = key.removeprefix(OPTIMIZER).rpartition(".")
                state.setdefault(name, []).append(entry)
        for name, entries in fields.items():
            for entry in entries:
                if entry in state.get(name, ()):
                    raise Mismatch(f"holds {shown(entry)}, which is a tensor", at("fields", name))
        return CheckpointFiles(path, record, groups, fields, user, by_replica, tensors, state)


def at(field: str, *keys: str | int) -> str:
    """The place of a field in state.json, for messages."""
    return f"{files.STATE}: {field}" + "".join(f"[{key!r}]" for key in keys)


def _plain(encoded: object, tensors: Mapping[str, torch.Tensor], place: str) -> object:
    try:
        return from_json(encoded, tensors)
    except Mismatch as error:
        raise Mismatch(str(error), place) from error


def _decoded(name: str, encoded: object, tensors: Mapping[str, torch.Tensor]) -> Any:
    value = _plain(encoded, {} if name == "fields" else tensors, at(name))
    objects = {"groups": value, "fields": [value, *_values(value)], "user": [value]}[name]
    if not isinstance(objects, list) or not all(
        isinstance(entry, dict) and all(isinstance(key, str) for key in entry) for entry in objects
    ):
        wanted = {"groups": "a list of objects", "fields": "an object of objects", "user": "an object"}[name]
        raise Mismatch(f"is {shown(value)} and must be {wanted}", at(name))
    return value


def _values(value: object) -> list[object]:
    return [*value.values()] if isinstance(value, dict) else []


def _check_kinds(expected: Mapping[str, TensorKind], tensors: Mapping[str, Stored[InFile]]) -> None:
    """The tensors in the files must be those of state.json, in which earlier versions list none."""
    for name in sorted(expected.keys() | tensors.keys()) if expected else ():
        there = TensorKind.of(tensors[name]) if name in tensors else None
        wanted = expected.get(name)
        if there != wanted:
            listed = f"lists {wanted or 'no such tensor'}"
            actual = "no file holds it" if there is None else f"its file holds {there}"
            raise Mismatch(f"{listed}, and {actual}", at("tensors", name))
