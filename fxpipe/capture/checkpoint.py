"""Captures reentrant activation checkpointing as non-reentrant.

The backward of reentrant checkpointing reruns the forward and calls autograd inside autograd, which a trace
cannot record.  Non-reentrant checkpointing runs the same ops and lets autograd record them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint

from fxpipe.ir.compat import pytree


@contextlib.contextmanager
def recorded_checkpoints() -> Iterator[None]:
    """While entered, ``checkpoint(…, use_reentrant=True)`` is recorded op by op."""
    before = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = _Recorded  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = before  # type: ignore[misc]


class _Recorded:
    """Takes the place of ``torch.utils.checkpoint.CheckpointFunction``, whose gradients it has.

    As for any custom autograd function, gradients flow only through tensors that are themselves arguments or
    results, not through lists of them, and only if an argument needs a gradient.
    """

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            with torch.no_grad():
                return function(*args)
        output = checkpoint.checkpoint(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            determinism_check="none",
        )
        return tuple(_own(x) for x in output) if isinstance(output, tuple) else _own(output)


def _own(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
