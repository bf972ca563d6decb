"""Weights in files: as Hugging Face keeps them, one safetensors file, or several with an index, beside a
config.json; or a checkpoint of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import math
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import ArtifactError
from fxpipe.plan.saved.files import open_tensors
from fxpipe.plan.spans import Spans, slices_of
from fxpipe.strict import MEBIBYTE, Mismatch, parse_json, read_text, refused, shown, structure
from fxpipe.training.weights.dcp_checkpoint import DistributedCheckpoint
from fxpipe.training.weights.dcp_metadata import METADATA
from fxpipe.training.weights.tensor_values import TensorSource

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: The bytes of a piece.  A file is opened anew for each: the pages that were read are the process's as long
#: as the file is mapped.
PIECE = 32 * MEBIBYTE
#: The ends of the names of files that hold weights, or say where they are.
_OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".index.json")
REMEDY = "Give a safetensors file, or the mapping that torch.load reads."


_Layout = tuple[tuple[int, ...], torch.dtype]


class Pretrained:
    """The tensors of a safetensors file, or of a directory of them, as :class:`TensorSource`."""

    def __init__(self, path: Path):
        """Raises ArtifactError if there is no such file, or one that cannot be read."""
        self._path = path
        self._files = _files_of(path)
        self._layouts: dict[Path, dict[str, _Layout]] = {}

    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def source(self, name: str) -> str:
        return str(self._files.get(name, self._path))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._layout(name)[0]

    def dtype(self, name: str) -> torch.dtype:
        return self._layout(name)[1]

    def _layout(self, name: str) -> _Layout:
        file = self._files[name]
        if file not in self._layouts:
            with open_tensors(file, REMEDY) as content:
                self._layouts[file] = {n: _layout_in(content, n) for n in content.keys()}  # noqa: SIM118 - no dict
        if name not in self._layouts[file]:
            raise ArtifactError(f"{file} does not hold {shown(name)}, which the index says it does.")
        return self._layouts[file][name]

    def parts(self, name: str, spans: Spans) -> Iterator[torch.Tensor]:
        shape, dtype = self._layout(name)
        if not shape:
            with open_tensors(self._files[name], REMEDY) as content:
                yield content.get_tensor(name)
            return
        rows, *others = slices_of(shape, spans)
        step = max(1, PIECE // max(1, math.prod(shape[1:]) * dtype.itemsize))
        for first in range(rows.start, rows.stop, step):
            with open_tensors(self._files[name], REMEDY) as content:
                piece = content.get_slice(name)[slice(first, min(first + step, rows.stop)), *others]
            yield piece
            del piece  # before the next one is read: a rank has memory for one


def values_at(path: Path) -> TensorSource:
    """Weights in files, of Hugging Face or of ``torch.distributed.checkpoint``.

    Raises ArtifactError if there are none, or they cannot be read.
    """
    if (path / METADATA).exists() and not any((path / name).exists() for name in (WEIGHTS, INDEX)):
        return DistributedCheckpoint(path)
    return Pretrained(path)


def _layout_in(content: Any, name: str) -> _Layout:
    piece = content.get_slice(name)
    shape = tuple(piece.get_shape())
    return shape, (piece[0:0] if shape else content.get_tensor(name)).dtype


def _files_of(path: Path) -> dict[str, Path]:
    """Name -> the file that holds it."""
    if path.is_dir() and (path / INDEX).exists():
        return _indexed(path)
    file = path / WEIGHTS if path.is_dir() else path
    if not file.exists():
        raise ArtifactError(
            f"{path} is no safetensors file, and no directory with {WEIGHTS}, {INDEX}, or {METADATA} of "
            "torch.distributed.checkpoint."
        )
    if zipfile.is_zipfile(file):
        raise ArtifactError(f"{file} is a file of torch.save: give what it holds, torch.load({str(path)!r}).")
    with open_tensors(file, REMEDY) as content:
        return dict.fromkeys(content.keys(), file)


def _indexed(path: Path) -> dict[str, Path]:
    with refused(ArtifactError, f"{path / INDEX}:", ""):
        data = parse_json(read_text(path / INDEX, 256 * MEBIBYTE))
        names: dict[str, str] = structure(
            data.get("weight_map") if isinstance(data, dict) else None, dict[str, str], "weight_map"
        )
        for file in names.values():
            if Path(file).name != file:
                raise Mismatch(f"is {shown(file)} and must be a file of the same directory", "weight_map")
    return {name: path / file for name, file in names.items()}


def export(state: Mapping[str, torch.Tensor], directory: Path, like: Path | None, largest: str) -> None:
    """Write to an empty directory; see ``Pipeline.export``."""
    try:
        from huggingface_hub import save_torch_state_dict
    except ImportError as error:
        raise ArtifactError("Exporting needs huggingface_hub: pip install huggingface_hub.") from error
    if like is not None and not (like / "config.json").exists():
        raise ArtifactError(f"{like} holds no config.json.")
    save_torch_state_dict(dict(state), directory, max_shard_size=largest, metadata={"format": "pt"})
    for file in sorted(like.iterdir()) if like is not None else ():
        if file.is_file() and not file.name.endswith(_OF_WEIGHTS):
            shutil.copy2(file, directory / file.name)
