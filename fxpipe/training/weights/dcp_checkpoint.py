"""Weights from a checkpoint of ``torch.distributed.checkpoint``: of a plain model, FSDP, torchtitan."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch

from fxpipe.errors import ArtifactError
from fxpipe.plan.spans import Spans, slices_of
from fxpipe.strict import Mismatch, open_regular, shown
from fxpipe.training.weights.area import Area, Stored
from fxpipe.training.weights.dcp_metadata import METADATA, Chunk, Metadata

#: The names under which scripts save the state dict of a model beside others.
NESTED = ("model", "state_dict")
_DAMAGED = (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, AssertionError, MemoryError)
REMEDY = (
    "Save it again; or, if you trust it, read it with torch.distributed.checkpoint.load, which unpickles "
    f"{METADATA}, and give pipe.load_state_dict the tensors."
)


class DistributedCheckpoint:
    """The model's tensors of a directory with ``.metadata``, as :class:`TensorSource`; of a tensor it reads
    the chunks that hold a part of what is wanted, one at a time."""

    def __init__(self, path: Path) -> None:
        """Raises ArtifactError if ``.metadata`` cannot be read, or has no state dict of a model."""
        self._path = path
        try:
            self._metadata = Metadata(path / METADATA)
            self._keys = _keys_of_model(self._metadata.paths)
        except Mismatch as error:
            raise self._refused(error) from error
        self._tensors: dict[str, Stored[Chunk]] = {}

    def names(self) -> tuple[str, ...]:
        return tuple(self._keys)

    def source(self, name: str) -> str:
        return str(self._path)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).dtype

    def _tensor(self, name: str) -> Stored[Chunk]:
        if name not in self._tensors:
            try:
                self._tensors[name] = self._metadata.tensor(self._keys[name])
            except Mismatch as error:
                raise self._refused(error) from error
        return self._tensors[name]

    def _refused(self, error: Mismatch) -> ArtifactError:
        return ArtifactError(f"{self._path / METADATA} {error}. {REMEDY}")

    def parts(self, name: str, spans: Spans) -> Iterator[torch.Tensor]:
        tensor = self._tensor(name)
        wanted = slices_of(tensor.shape, spans)
        if not wanted:
            (chunk,) = tensor.chunks
            yield self._read(name, tensor, chunk)
            return
        rows, *others = wanted
        cuts = {row for c in tensor.chunks for row in (c.area.begin[0], c.area.end[0])}
        bounds = [rows.start, *sorted(cut for cut in cuts if rows.start < cut < rows.stop), rows.stop]
        for begin, end in pairwise(bounds):
            yield self._rows(name, tensor, Area.of((slice(begin, end), *others)))

    def _rows(self, name: str, tensor: Stored[Chunk], area: Area) -> torch.Tensor:
        """A part of a tensor; all its rows are in the same chunks."""
        rows = torch.empty(area.shape, dtype=tensor.dtype)
        for chunk, shared in tensor.parts(area):
            part = self._read(name, tensor, chunk)[shared.within(chunk.area.begin)]
            if part.shape == area.shape:
                return part
            rows[shared.within(area.begin)] = part
        return rows

    def _read(self, name: str, tensor: Stored[Chunk], chunk: Chunk) -> torch.Tensor:
        file = self._path / chunk.file
        try:
            part = _loaded(file, chunk)
        except Mismatch as error:
            raise ArtifactError(f"{file} {error}, where it should have {name}. {REMEDY}") from error
        if not isinstance(part, torch.Tensor) or part.layout != torch.strided or part.is_meta:
            raise ArtifactError(f"{file} holds something else than {name} from byte {chunk.begin} on.")
        if (tuple(part.shape), part.dtype) != (chunk.area.shape, tensor.dtype):
            raise ArtifactError(
                f"{file} holds a tensor of {tuple(part.shape)}, {part.dtype}, from byte {chunk.begin} on. It "
                f"must be the part of {name} of {chunk.area.shape}, {tensor.dtype}, by {METADATA}."
            )
        return part.detach()


def _loaded(path: Path, chunk: Chunk) -> object:
    """Load what torch.save wrote to these bytes of a file; tensors and plain values alone are unpickled."""
    with open_regular(path) as file:
        file.seek(0, io.SEEK_END)
        if chunk.begin + chunk.length > file.tell():
            raise Mismatch(f"is cut short: it has {file.tell()} of {chunk.begin + chunk.length} bytes")
        file.seek(chunk.begin)
        data = io.BytesIO(file.read(chunk.length))
    try:
        with zipfile.ZipFile(data) as archive:
            entries = archive.infolist()
        if any(e.compress_type != zipfile.ZIP_STORED or e.file_size > chunk.length for e in entries):
            raise Mismatch("is compressed")
        data.seek(0)
        return torch.load(data, map_location="cpu", weights_only=True)
    except Mismatch:
        raise
    except (*_DAMAGED, RuntimeError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise Mismatch(f"is damaged from byte {chunk.begin} on, or not of torch.save") from error


def _keys_of_model(paths: dict[str, tuple[str | int, ...]]) -> dict[str, str]:
    """The model's name of a tensor -> its key in the checkpoint.

    A state dict of a model is flat: it is the tensors that are beside each other, in the mapping "model" or
    "state_dict" that is nested least, or in no mapping.
    """
    above = {path[:-1] for path in paths.values()}
    nested = sorted((p for p in above if p and p[-1] in NESTED), key=len)
    least = [p for p in nested if len(p) == len(nested[0])] or [()]
    names = {str(path[-1]): key for key, path in paths.items() if path[:-1] == least[0]}
    if not names or len(least) > 1:
        which, candidates = ("several state dicts", least) if names else ("no state dict", above)
        mappings = ", ".join(sorted({shown("/".join(map(str, p))) for p in candidates})[:4]) or "none"
        raise Mismatch(f"has {which} of a model, {' or '.join(NESTED)}: its tensors are in {mappings}")
    return names
