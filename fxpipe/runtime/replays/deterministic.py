"""Lets ops take kernels that give the same bits in each run, where they have such."""

from __future__ import annotations

from typing import Any

import torch

from fxpipe.runtime.torch_private import TorchDispatchMode


class Deterministic(TorchDispatchMode):
    """In the block each op runs by torch's deterministic algorithms; one that has none runs as ever.

    Op by op: with ``warn_only=True`` torch's attention keeps its faster kernels, and without it an op that
    has no deterministic kernel is an error, which it raises before it computes anything.
    """

    def __enter__(self) -> object:
        is_on = torch.are_deterministic_algorithms_enabled()
        self._before = is_on, torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        is_on, warns = self._before
        torch.use_deterministic_algorithms(is_on, warn_only=warns)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
        torch.use_deterministic_algorithms(False)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.use_deterministic_algorithms(True)
