"""Tensors of all ranks in one directory of safetensors files, by torch.distributed.checkpoint.

A rank may hold rows of a tensor.  Reading takes any rows, whatever rows the ranks that wrote held.  Nothing
is pickled into the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


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


def stored(directory: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The shape and dtype of each tensor in a directory."""
    found = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read(tensors: Mapping[str, torch.Tensor | Part], directory: Path) -> None:
    """Fill the tensors, which must have the shapes that are stored."""
    with _alone():
        load(
            {name: t.tensor if isinstance(t, Part) else t for name, t in tensors.items()},
            storage_reader=HuggingFaceStorageReader(str(directory)),
            planner=_LoadPlanner({name: t for name, t in tensors.items() if isinstance(t, Part)}),
            no_dist=True,
        )


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


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, parts: Mapping[str, Part]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def create_local_plan(self) -> LoadPlan:
        assert isinstance(self.metadata, Metadata)
        items = []
        for name, tensor in self.state_dict.items():
            entry = self.metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            part = self._parts.get(name) or Part(tensor, 0, len(tensor) if tensor.dim() else 0)
            offsets = part.offsets if tensor.dim() else torch.Size()
            chunk = ChunkStorageMetadata(offsets, tensor.shape)
            items += create_read_items_for_chunk_list(name, entry, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        tensor: torch.Tensor = self.state_dict[index.fqn]
        return tensor
