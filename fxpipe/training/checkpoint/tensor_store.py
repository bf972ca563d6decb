"""Tensors of all ranks in one directory of safetensors files, written by torch.distributed.checkpoint.

A rank may hold rows of a tensor.  Reading takes any rows, whatever rows the ranks that wrote held, and trusts
no file.  Nothing is pickled into the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from fxpipe.plan.rows import Rows
from fxpipe.strict import Misfit, open_regular, parse_json, shown


@dataclass(frozen=True)
class Part:
    """Rows ``begin``… of a tensor of ``rows`` rows."""

    tensor: torch.Tensor
    begin: int
    rows: int

    @property
    def offsets(self) -> torch.Size:
        return torch.Size([self.begin, *[0] * (self.tensor.dim() - 1)])

    @property
    def whole(self) -> torch.Size:
        return torch.Size([self.rows, *self.tensor.shape[1:]])


@dataclass(frozen=True)
class Chunk:
    """The rows of a tensor in one file, from ``begin`` on; a number is one row."""

    file: Path
    begin: int
    rows: int


@dataclass(frozen=True)
class Stored:
    """A tensor in files, by chunks in the order of their rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def write(
    tensors: Mapping[str, torch.Tensor | Part], directory: Path, group: dist.ProcessGroup | None
) -> None:
    """Write the tensors of all ranks, each into a file of its own; a tensor of several ranks once.

    group: of all ranks, for tensors on the CPU; None for a single process.
    Raises CheckpointException on every rank if one cannot write.
    """
    with _alone():
        save(
            {name: t.tensor if isinstance(t, Part) else t for name, t in tensors.items()},
            storage_writer=HuggingFaceStorageWriter(str(directory), save_distributed=True),
            planner=_SavePlanner({name: t for name, t in tensors.items() if isinstance(t, Part)}),
            process_group=group,
            no_dist=group is None,
        )


def stored(directory: Path, names: Iterable[str]) -> dict[str, Stored]:
    """The tensors in these files of a directory.

    Raises Misfit, naming the file, for one that is no safetensors file of a checkpoint, or whose part of a
    tensor does not fit the other parts.
    """
    parts: dict[str, list[tuple[Chunk, tuple[int, ...], torch.dtype]]] = {}
    for name in sorted(names):
        with _opened(directory / name) as file:
            offsets, held = _offsets(file.metadata() or {}), set(file.keys())
            for key in sorted(held ^ offsets.keys()):
                wrong = "does not hold" if key not in held else "does not say which rows it holds of"
                raise Misfit(f"{wrong} {shown(key)}")
            for key, offset in offsets.items():
                piece = file.get_slice(key)
                shape = tuple(piece.get_shape())
                dtype = (piece[0:0] if shape else file.get_tensor(key)).dtype
                if len(offset) != len(shape) or any(offset[1:]):
                    raise Misfit(f"holds {shown(key)} at {shown(offset)}, which are no rows")
                chunk = Chunk(directory / name, *((offset[0], shape[0]) if shape else (0, 1)))
                parts.setdefault(key, []).append((chunk, shape, dtype))
    return {key: _whole(key, found) for key, found in parts.items()}


def _offsets(metadata: Mapping[str, str]) -> dict[str, list[int]]:
    """Tensor -> where the part in this file begins in each dimension."""
    try:
        given = parse_json(metadata.get("DCP_SHARDING_INFO", ""))
        found = {key: part["saved_offsets"] for key, part in given.items()}
    except (Misfit, AttributeError, KeyError, TypeError) as error:
        raise Misfit("does not say which rows it holds: it was not written as a checkpoint") from error
    for key, offset in found.items():
        if type(offset) is not list or not all(type(n) is int and n >= 0 for n in offset):
            raise Misfit(f"holds {shown(key)} at {shown(offset)}, which is no place")
    return found


def _whole(name: str, parts: list[tuple[Chunk, tuple[int, ...], torch.dtype]]) -> Stored:
    parts = sorted(parts, key=lambda part: (part[0].begin, part[0].rows))
    (first, shape, dtype), row = parts[0], 0
    for chunk, other, kind in parts:
        if (other[1:], kind) != (shape[1:], dtype) or chunk.begin != row or (not shape and chunk != first):
            raise Misfit(
                f"has a part of {shown(name)} that does not fit the others: row {chunk.begin} of "
                f"{kind} {other}, after {row} rows of {dtype} {shape}",
                chunk.file.name,
            )
        row += chunk.rows
    return Stored((row, *shape[1:]) if shape else (), dtype, tuple(chunk for chunk, *_ in parts))


def read(stored: Mapping[str, Stored], wanted: Sequence[tuple[str, Rows | None]]) -> list[torch.Tensor]:
    """Tensors, on the CPU, or some of their rows: of each its name, and the rows, None for all.

    Raises Misfit, naming the file, for one that cannot be read.
    """
    found: list[tuple[int, torch.Tensor]] = []
    pieces: dict[Path, list[tuple[int, Chunk]]] = {}
    for k, (name, rows) in enumerate(wanted):
        entry = stored[name]
        begin, end = (rows.begin, rows.end) if rows else (0, entry.shape[0] if entry.shape else 1)
        shape = (end - begin, *entry.shape[1:]) if entry.shape else ()
        found.append((begin, torch.empty(shape, dtype=entry.dtype)))
        for chunk in entry.chunks:
            if chunk.begin < end and begin < chunk.begin + chunk.rows:
                pieces.setdefault(chunk.file, []).append((k, chunk))
    for path, parts in pieces.items():
        with _opened(path) as file:
            for k, chunk in parts:
                (name, _), (first, target) = wanted[k], found[k]
                if not target.dim():
                    target.copy_(file.get_tensor(name))
                    continue
                begin = max(first, chunk.begin)
                end = min(first + len(target), chunk.begin + chunk.rows)
                part = file.get_slice(name)[begin - chunk.begin : end - chunk.begin]
                target[begin - first : end - first] = part
    return [tensor for _, tensor in found]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        open_regular(path).close()
        with safe_open(path, "pt") as file:
            yield file
    except (Misfit, OSError, SafetensorError) as error:
        wrong = str(error) if isinstance(error, Misfit) else f"is no safetensors file: {error}"
        raise Misfit(wrong, path.name) from error


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without torch's warning that a process reads or writes for itself, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, parts: Mapping[str, Part]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan: SavePlan = dataclasses.replace(plan, items=[self._as_part(item) for item in plan.items])
        return self.plan

    def _as_part(self, item: WriteItem) -> WriteItem:
        part = self._parts.get(item.index.fqn)
        if part is None or item.tensor_data is None:
            return item
        chunk = ChunkStorageMetadata(part.offsets, part.tensor.shape)
        return WriteItem(
            index=MetadataIndex(item.index.fqn, part.offsets),
            type=WriteItemType.SHARD,
            tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk, size=part.whole),
        )

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn]
