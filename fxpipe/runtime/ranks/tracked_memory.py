"""Measures the bytes that a rank holds between its ops, by tracking every storage that it allocates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fxpipe.runtime.torch_private import StorageWeakRef, TorchDispatchMode, pytree, storage_number


class SavedBytes(TorchDispatchMode):
    """While entered on a rank's thread, ``peak`` is the maximum number of live bytes between two ops.

    given: tensors that are not counted (parameters, gradients, the batch).  Messages that have arrived for
    the next op do not count until that op has saved them.
    """

    def __init__(self, uncounted: Iterable[torch.Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept_alive: list[torch.Tensor] = []  # so that no new storage gets one of their addresses
        self._ignored: set[int] = set()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._arrived: set[int] = set()
        self.peak = 0
        self.ignore(uncounted)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor)
        return result

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these tensors either."""
        added = list(tensors)
        self._kept_alive += added
        self._ignored |= {storage_number(t) for t in added}
        self._live = {key: entry for key, entry in self._live.items() if key not in self._ignored}

    def _watch(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference.cdata not in self._ignored:
            self._live[reference.cdata] = (reference, storage.nbytes())
        key: int = reference.cdata
        return key

    def arrived(self, tensor: torch.Tensor) -> None:
        self._arrived.add(self._watch(tensor))

    def between_ops(self, name: str) -> None:
        """Measure before op ``name`` starts."""
        self.measure()
        self._arrived.clear()

    def measure(self) -> None:
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(n for key, (_, n) in self._live.items() if key not in self._arrived))
