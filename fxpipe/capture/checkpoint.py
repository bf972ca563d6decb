"""Captures reentrant activation checkpointing as non-reentrant.

The backward of reentrant checkpointing reruns the forward and calls autograd inside autograd, which a trace
cannot record.  Non-reentrant checkpointing runs the same ops and lets autograd record them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from fxpipe.capture.provenance import Provenance
from fxpipe.errors import CaptureError
from fxpipe.ir.compat import pytree


@contextlib.contextmanager
def recorded_checkpoints() -> Iterator[None]:
    """While entered, ``checkpoint(…, use_reentrant=True)`` is recorded op by op."""
    before = checkpoint.CheckpointFunction, torch.is_grad_enabled
    checkpoint.CheckpointFunction = _Recorded  # type: ignore[misc, assignment]
    torch.is_grad_enabled = _is_grad_enabled
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = before[0]  # type: ignore[misc]
        torch.is_grad_enabled = before[1]
        _Recorded.running = 0


_asked = torch.is_grad_enabled


def _is_grad_enabled() -> bool:
    """``torch.is_grad_enabled()``, refused to code within reentrant checkpointing."""
    frame = sys._getframe(1)
    if _Recorded.running and Provenance.is_users(frame.f_code.co_filename):
        raise _refused(frame)
    return _asked()


class _GradMode(TorchFunctionMode):
    """Refuses to tell whether a result within reentrant checkpointing requires a gradient."""

    def __init__(self, arguments: Sequence[Any]):
        super().__init__()
        self._arguments = set(map(id, arguments))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.requires_grad and func.__name__ == "__get__":
            frame, tensor = sys._getframe(1), args[0]
            known = id(tensor) in self._arguments or tensor.is_leaf
            if not known and Provenance.is_users(frame.f_code.co_filename):
                raise _refused(frame)
        return func(*args, **(kwargs or {}))


def _refused(frame: FrameType) -> CaptureError:
    return CaptureError(
        "The model's code asks for the grad mode within reentrant checkpointing, which runs it first without "
        f"gradients, at {frame.f_code.co_filename}:{frame.f_lineno}. Give use_reentrant=False."
    )


class _Recorded:
    """Takes the place of ``torch.utils.checkpoint.CheckpointFunction``, whose gradients it has.

    As for any custom autograd function, gradients flow only through tensors that are themselves arguments or
    results, not through lists of them, and only if an argument needs a gradient.
    """

    running = 0

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            with torch.no_grad():
                return function(*args)
        _Recorded.running += 1
        with _GradMode(args):
            output = checkpoint.checkpoint(
                function,
                *args,
                use_reentrant=False,
                preserve_rng_state=preserve_rng_state,
                determinism_check="none",
            )
        _Recorded.running -= 1
        return tuple(_own(x) for x in output) if isinstance(output, tuple) else _own(output)


def _own(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
