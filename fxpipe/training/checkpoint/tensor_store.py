"""Tensors of all ranks in one directory of safetensors files, written by torch.distributed.checkpoint.

A rank may hold a part of a tensor: rows, or a lane's share.  Reading takes any part, whatever parts the ranks
that wrote held, and trusts no file.  Nothing is pickled into the files.
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
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from fxpipe.plan.saved.files import tensors_in
from fxpipe.plan.spans import Spans, slices_of, with_zeros
from fxpipe.strict import Mismatch, parse_json, shown
from fxpipe.training.weights.area import Area, InFile, Stored, unlike_whole


@dataclass(frozen=True)
class Part:
    """A part of a tensor of shape ``whole``, which begins at ``offsets``."""

    tensor: torch.Tensor
    offsets: torch.Size
    whole: torch.Size


def write(
    tensors: Mapping[str, torch.Tensor | Part], directory: Path, group: dist.ProcessGroup | None
) -> None:
    """Write the tensors of all ranks, each into a file of its own; a tensor of several ranks once.

    group: of all ranks, for tensors on the CPU; None for a single process.  Parts without elements are left
        out.
    Raises CheckpointException on every rank if one cannot write.
    """
    tensors = {
        name: t
        for name, t in tensors.items()
        if not isinstance(t, Part) or t.tensor.numel() or not t.whole.numel()
    }
    with warnings.catch_warnings():
        # That a process writes for itself, which is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(
            {name: t.tensor if isinstance(t, Part) else t for name, t in tensors.items()},
            storage_writer=HuggingFaceStorageWriter(str(directory), save_distributed=True),
            planner=_SavePlanner({name: t for name, t in tensors.items() if isinstance(t, Part)}),
            process_group=group,
            no_dist=group is None,
        )


def stored(directory: Path, names: Iterable[str]) -> dict[str, Stored[InFile]]:
    """The tensors in these files of a directory.

    Raises Mismatch, naming the file, for one that is no safetensors file of a checkpoint, or whose part of a
    tensor does not fit the other parts.
    """
    parts: dict[str, list[tuple[InFile, torch.dtype]]] = {}
    for name in sorted(names):
        with _opened(directory / name) as file:
            offsets, keys = _offsets(file.metadata() or {}), set(file.keys())
            for key in sorted(keys ^ offsets.keys()):
                wrong = "does not hold" if key not in keys else "does not say which part it holds of"
                raise Mismatch(f"{wrong} {shown(key)}")
            for key, offset in offsets.items():
                piece = file.get_slice(key)
                shape = tuple(piece.get_shape())
                dtype = (piece[0:0] if shape else file.get_tensor(key)).dtype
                if len(offset) != len(shape):
                    raise Mismatch(f"holds {shown(key)} at {shown(offset)}, which is no place in it")
                chunk = InFile(Area(tuple(offset), shape), str(directory / name))
                parts.setdefault(key, []).append((chunk, dtype))
    return {key: _whole(key, chunks) for key, chunks in parts.items()}


def _offsets(metadata: Mapping[str, str]) -> dict[str, list[int]]:
    """Tensor -> where the part in this file begins in each dimension."""
    try:
        parts = parse_json(metadata.get("DCP_SHARDING_INFO", ""))
        offsets = {key: part["saved_offsets"] for key, part in parts.items()}
    except (Mismatch, AttributeError, KeyError, TypeError) as error:
        raise Mismatch("does not say which parts it holds: it was not written as a checkpoint") from error
    for key, offset in offsets.items():
        if type(offset) is not list or not all(type(n) is int and n >= 0 for n in offset):
            raise Mismatch(f"holds {shown(key)} at {shown(offset)}, which is no place")
    return offsets


def _whole(name: str, parts: list[tuple[InFile, torch.dtype]]) -> Stored[InFile]:
    """Raises Mismatch unless the parts have each element of a tensor once."""
    parts = sorted(parts, key=lambda part: (part[0].area.begin, part[0].area.shape))
    chunks, dtypes = tuple(chunk for chunk, _ in parts), {dtype for _, dtype in parts}
    areas = [chunk.area for chunk in chunks]
    shape = tuple(map(max, zip(*(area.end for area in areas), strict=False)))
    problem = f"they are {' and '.join(sorted(map(str, dtypes)))}" if len(dtypes) > 1 else ""
    if problem := problem or unlike_whole(shape, areas):
        file = Path(chunks[-1].file).name
        raise Mismatch(f"has a part of {shown(name)} that does not fit the others: {problem}", file)
    return Stored(shape, parts[0][1], chunks)


def read(stored: Mapping[str, Stored[InFile]], wanted: Sequence[tuple[str, Spans]]) -> list[torch.Tensor]:
    """Tensors, on the CPU, or parts of them with the zeros behind: of each its name, and what is wanted of
    its dimensions.

    Raises Mismatch, naming the file, for one that cannot be read.
    """
    tensors: list[torch.Tensor] = []
    pieces: dict[Path, list[tuple[str, tuple[slice, ...], torch.Tensor]]] = {}
    for name, spans in wanted:
        entry = stored[name]
        area = Area.of(slices_of(entry.shape, spans))
        target = torch.empty(area.shape, dtype=entry.dtype, device="cpu")
        tensors.append(target)
        for chunk, common in entry.parts(area):
            place = target[common.within(area.begin)] if area.shape else target
            pieces.setdefault(Path(chunk.file), []).append((name, common.within(chunk.area.begin), place))
    for path, parts in pieces.items():  # each file is opened once, however many tensors are in it
        with _opened(path) as file:
            for name, inside, place in parts:
                place.copy_(file.get_slice(name)[inside] if inside else file.get_tensor(name))
    parts_read = zip(tensors, wanted, strict=True)
    return [with_zeros(tensor, spans, stored[name].shape) for tensor, (name, spans) in parts_read]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with tensors_in(path) as file:
            yield file
    except Mismatch as error:
        raise Mismatch(str(error), path.name) from error


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

    def lookup_object(self, index: MetadataIndex) -> object:
        return self.state_dict[index.fqn]
