"""Captures reentrant activation checkpointing as non-reentrant.

The backward of reentrant checkpointing reruns the forward and calls autograd inside autograd, which a trace
cannot record.  Non-reentrant checkpointing runs the same ops and lets autograd record them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from fxpipe.capture.provenance import Provenance
from fxpipe.ir.compat import pytree


def recorded_checkpoints(provenance: Provenance) -> AbstractContextManager[object]:
    """While entered, ``checkpoint(…, use_reentrant=True)`` is recorded op by op.

    provenance: of the trace.
    """
    return mock.patch.object(checkpoint, "CheckpointFunction", _Recorded(provenance))


#: What tells whether a tensor was computed with gradients.
HISTORY = (torch.Tensor.requires_grad, torch.Tensor.grad_fn, torch.Tensor.is_leaf)


class _GradMode(TorchFunctionMode):
    """Refuses to tell the grad mode within reentrant checkpointing, and the history of results there."""

    def __init__(self, arguments: Sequence[object], provenance: Provenance):
        super().__init__()
        self._arguments, self._provenance = set(map(id, arguments)), provenance

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        asked = getattr(func, "__self__", None) in HISTORY and func.__name__ == "__get__"
        if asked and id(args[0]) not in self._arguments and not args[0].is_leaf:
            self._asked(sys._getframe(1))
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> _GradMode:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._profile = sys.getprofile()
        sys.setprofile(self._called)  # the function is under many names, and passes no mode
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(self._profile)
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def _called(self, frame: FrameType, event: str, function: object) -> None:
        if event == "c_call" and function is torch.is_grad_enabled:
            self._asked(frame)

    def _asked(self, frame: FrameType) -> None:
        if Provenance.is_users(frame.f_code.co_filename):
            where = "within reentrant checkpointing, which runs it first without gradients"
            refusals = self._provenance.answers.refusals
            refusals.refuse_code(f"asks for the grad mode {where}", "Give use_reentrant=False.")


class _Recorded:
    """Takes the place of ``torch.utils.checkpoint.CheckpointFunction``, whose gradients it has.

    As for any custom autograd function, gradients flow only through tensors that are themselves arguments or
    results, not through lists of them, and only if an argument needs a gradient.
    """

    def __init__(self, provenance: Provenance):
        self._provenance = provenance

    def apply(self, function: Callable[..., object], preserve_rng_state: bool, *args: object) -> object:
        if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            with torch.no_grad():
                return function(*args)
        with _GradMode(args, self._provenance):
            output = checkpoint.checkpoint(
                function,
                *args,
                use_reentrant=False,
                preserve_rng_state=preserve_rng_state,
                determinism_check="none",
            )
        return (
            tuple(_without_history(x) for x in output)
            if isinstance(output, tuple)
            else _without_history(output)
        )


def _without_history(result: object) -> object:
    if isinstance(result, torch.Tensor):
        return result
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
