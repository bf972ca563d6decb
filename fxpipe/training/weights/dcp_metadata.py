"""What a checkpoint of ``torch.distributed.checkpoint`` says of its tensors, in the file ``.metadata``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxpipe.strict import MEBIBYTE, Mismatch, open_regular, shown
from fxpipe.training.weights.area import Area, InFile, Stored, unlike_whole
from fxpipe.training.weights.dcp_pickle import Record, numbers, of_kind, read_plain

METADATA = ".metadata"
LARGEST = 512 * MEBIBYTE


@dataclass(frozen=True)
class Chunk(InFile):
    """A part of a tensor, and the bytes of the file that ``torch.save`` wrote of it."""

    begin: int
    length: int


class Metadata:
    """The tensors of a checkpoint, by their keys.  Raises Mismatch, here and later, for what does not fit."""

    def __init__(self, path: Path) -> None:
        with open_regular(path) as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise Mismatch(f"is larger than {LARGEST // MEBIBYTE} MiB, the maximum")
        root = of_kind(read_plain(data), "Metadata")
        self._tensors = {
            key: entry
            for key, entry in _mapping(root.get("state_dict_metadata")).items()
            if isinstance(key, str) and isinstance(entry, Record) and entry.kind == "TensorStorageMetadata"
        }
        # Without a planner's data the state dict was flat.
        planned = root.get("planner_data")
        paths = _mapping(planned) if planned is not None else {}
        #: Key -> its path in the nested state dict.
        self.paths = {key: _path(paths.get(key, (key,))) for key in self._tensors}
        self._places: dict[tuple[str, tuple[int, ...]], Record] = {}
        for index, info in _mapping(root.get("storage_data")).items():
            key = of_kind(index, "MetadataIndex").get("fqn")
            if isinstance(key, str) and key in self._tensors:
                self._places[key, numbers(index.get("offset"))] = of_kind(info, "_StorageInfo")

    def tensor(self, key: str) -> Stored[Chunk]:
        """The chunks of one tensor, checked to make it up."""
        stored = self._tensors[key]
        shape, dtype = numbers(stored.get("size")), _dtype(stored.get("properties"))
        records = stored.get("chunks")
        if not isinstance(records, list):
            raise Mismatch("holds chunks that are no list")
        records = [of_kind(record, "ChunkStorageMetadata") for record in records]
        areas = [Area(numbers(record.get("offsets")), numbers(record.get("sizes"))) for record in records]
        filled = [area for area in areas if math.prod(area.shape)]
        if problem := unlike_whole(shape, filled):
            raise Mismatch(f"has parts of {shown(key)} that do not make it up: {problem}")
        return Stored(shape, dtype, tuple(self._chunk(key, area) for area in filled))

    def _chunk(self, key: str, area: Area) -> Chunk:
        info = self._places.get((key, area.begin))
        if info is None:
            raise Mismatch(f"does not say where {shown(key)} is from {area.begin}")
        file, state = info.get("relative_path"), info.state
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            what = shown(file) if isinstance(file, str) else "no name"
            raise Mismatch(f"has {shown(key)} in {what}, which must be a file of the same directory")
        if state.get("transform_descriptors"):
            raise Mismatch(f"says that {shown(key)} is compressed: save it without extensions")
        begin, length = numbers((info.get("offset"), info.get("length")))
        return Chunk(area, file, begin, length)


def _mapping(value: object) -> dict[Any, object]:
    if type(value) is not dict:
        raise Mismatch("has something else where a mapping must be")
    return value


def _path(value: object) -> tuple[str | int, ...]:
    if type(value) is not tuple or not value or not all(type(name) in (str, int) for name in value):
        raise Mismatch("has something else where a path in the state dict must be")
    return value


def _dtype(properties: object) -> torch.dtype:
    state = of_kind(properties, "TensorProperties").state
    if not isinstance(state, tuple) or not state or not isinstance(state[0], torch.dtype):
        raise Mismatch("has a tensor without a dtype")
    return state[0]
