"""Batches for ``fxpipe run``: rows of a safetensors file, or what a Python function gives."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.stateful import Stateful

from fxpipe.cli.run.functions import called
from fxpipe.errors import BatchError, number_of
from fxpipe.plan.step import BatchSpec, Leaf
from fxpipe.strict import Mismatch, open_regular, shown


class Data(Protocol):
    """``once``: the number of whole batches, None if it is not known.  ``state``: what a checkpoint keeps of
    it."""

    once: int | None
    state: dict[str, Stateful]

    def batch(self, step: int) -> object:
        """The batch of a step; steps are asked for in order, the first after a restart may be any."""
        ...


class FileData:
    """The rows of a safetensors file with one tensor for each leaf of the batch, under the leaf's name.

    Each step takes the next rows, each replica its part of them in turn; after the last whole batch of all
    replicas it continues with the first.  Only the rows of a step are in memory.
    """

    def __init__(
        self,
        path: Path,
        spec: BatchSpec,
        microbatches: int,
        leaves: Iterable[str] | None = None,
        replica: int = 0,
        replicas: int = 1,
    ):
        """microbatches: of a replica.  leaves: those that this process needs; all if None.

        Raises BatchError if the file cannot be read, lacks a leaf or has fewer rows than a batch.
        """
        self.state: dict[str, Stateful] = {}
        self._rows = microbatches * next((leaf.shape[0] for leaf in spec.leaves if leaf.shape), 1)
        self._replica, self._replicas = replica, replicas
        names = None if leaves is None else set(leaves)
        self._leaves = [leaf for leaf in spec.leaves if names is None or leaf.name in names]
        self._fixed = {leaf.name: _fixed_value(leaf) for leaf in self._leaves if leaf.shape is None}
        tensors = [leaf for leaf in self._leaves if leaf.shape is not None]
        try:
            open_regular(path).close()
            file: Any = safe_open(path, "pt")
            held = set(file.keys())
        except (Mismatch, OSError, SafetensorError) as error:
            wrong = error if isinstance(error, Mismatch) else f"cannot be read as a safetensors file: {error}"
            raise BatchError(f"{path} {wrong}") from error
        for leaf in tensors:
            if leaf.name not in held:
                raise BatchError(f"{path} has no tensor {leaf.name!r}; it holds {', '.join(sorted(held))}.")
        self._slices = {leaf.name: file.get_slice(leaf.name) for leaf in tensors if leaf.shape}
        self._whole = {leaf.name: file.get_tensor(leaf.name) for leaf in tensors if not leaf.shape}
        # Of all leaves in the file: a rank that needs none must make as many steps as the others.
        shapes = [file.get_slice(leaf.name).get_shape() for leaf in spec.leaves if leaf.name in held]
        whole = self._rows * replicas
        total = min((shape[0] for shape in shapes if shape), default=whole)
        self.once: int | None = total // whole if shapes else None
        if self.once == 0:
            of = "this pipeline" if replicas == 1 else f"{replicas} replicas of this pipeline"
            raise BatchError(
                f"{path} has {number_of(total, 'row')}, but one batch of {of} takes {whole}: give more "
                "rows, or compile for fewer microbatches."
            )

    def batch(self, step: int) -> dict[str, object]:
        # The rows of a step are those of all replicas, one behind the other.
        start = (step % (self.once or 1) * self._replicas + self._replica) * self._rows
        rows = {name: s[start : start + self._rows] for name, s in self._slices.items() if s.get_shape()}
        return {**rows, **self._whole, **self._fixed}


class LoaderData:
    """What ``module:function`` returns: an iterable of batches, a DataLoader for example; again when it ends.

    Of several replicas each takes its own rows: the function is called with the keyword arguments ``replica``
    and ``replicas``.
    After a restart an iterable with ``state_dict`` and ``load_state_dict`` goes on where it was; another one
    is asked for the batches that were used, which are thrown away.
    """

    def __init__(self, where: str, replica: int = 0, replicas: int = 1):
        """Raises BatchError, before it calls it, if there is no such function or it is none that gives a
        loader, and if it gives nothing to take batches from."""
        self.once: int | None = None
        arguments = {} if replicas == 1 else {"replica": replica, "replicas": replicas}
        returns = "an iterable of batches." + (" Each replica takes rows of its own." if arguments else "")
        loader: object = called(where, returns, BatchError, arguments)
        if not isinstance(loader, Iterable) or isinstance(loader, (str, bytes, Mapping, torch.Tensor)):
            raise BatchError(f"{where} gives a {type(loader).__name__}; it must give an iterable of batches.")
        self._loader: Iterable[object] = loader
        batches: object = loader
        self.state: dict[str, Stateful] = {"data": batches} if isinstance(batches, Stateful) else {}
        self._where, self._next = where, 0
        self._batches: Iterator[object] | None = None

    def batch(self, step: int) -> object:
        if self.state and self._batches is None:  # what a checkpoint has given it says where it goes on
            self._next = step
        while self._next < step:
            self._take()
            self._next += 1
        self._next += 1
        return self._take()

    def _take(self) -> object:
        for _ in range(2):  # what is left of this time through the data, or the next time
            if self._batches is None:
                self._batches = iter(self._loader)
            batch = next(self._batches, None)
            if batch is not None:
                return batch
            self._batches = None
        raise BatchError(f"{self._where} gives no batches.")


def data_from(
    where: str,
    spec: BatchSpec,
    microbatches: int,
    leaves: Iterable[str] | None = None,
    replica: int = 0,
    replicas: int = 1,
) -> Data:
    """The data of ``--data``: a file, or ``module:function``."""
    if ":" in where and not Path(where).exists():
        return LoaderData(where, replica, replicas)
    return FileData(Path(where), spec, microbatches, leaves, replica, replicas)


def _fixed_value(leaf: Leaf) -> object:
    """The value, in the example, of a leaf that is no tensor.

    Raises BatchError for a value that cannot be parsed from its ``repr``.
    """
    try:
        return ast.literal_eval(leaf.value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise BatchError(
            f"{leaf.name!r} was {shown(leaf.value)} in the example, which cannot be parsed. Train "
            "with pipe.step, and give it in the batch."
        ) from error
