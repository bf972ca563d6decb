"""Errors that only a trace raises.  The model's code may catch one, and go another way than in eager.

    an op raises on the example's tensors as well  ──►  eager's own way
    an op raises on fake tensors alone             ──►  refused

The first refused one ends the trace, also if the model's code goes on (``except``, ``hasattr``,
``contextlib.suppress``, ``return`` in ``finally``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from fxpipe.errors import CaptureError
from fxpipe.ir import compat
from fxpipe.ir.compat import pytree
from fxpipe.plan.dtensors import is_dtensor


class Refusals:
    """The errors that a trace must not let pass.  ``error``: the first one that is refused, raised at
    ``place``.  ``is_caught``: whether the model's code went on."""

    def __init__(self, place: Callable[[], str], value: Callable[[torch.Tensor], torch.Tensor | None]):
        """place: gives the current place in the model's code.  value: gives what a traced tensor is with the
        example; None if that is not known."""
        self._place, self._value = place, value
        self.error: Exception | None = None
        self.place, self.is_caught = "", False

    def refuse(self, error: CaptureError) -> NoReturn:
        """Raise an error in the model's code."""
        self._note(error)
        raise error

    def refuse_code(self, does: str, remedy: str) -> NoReturn:
        """Refuse what the model's code does now.  does, remedy: as text, the latter a sentence."""
        self.refuse(CaptureError(f"The model's code {does}, at {self._place()}. {remedy}"))

    def judged(
        self, run: Callable[..., object], func: object, args: object, kwargs: object, *others: object
    ) -> object:
        """Run an op, or answer a question, for the model's code, and judge the error."""
        try:
            return run(func, args, kwargs, *others)
        except compat.StopRecomputation:  # ends the second run of a checkpointed function
            raise
        except Exception as error:  # of any kind, as the model's code may catch any
            # What an op itself runs is judged with the op.
            if self.error is None and compat.is_tracing() and not self._raises_in_eager(func, args, kwargs):
                self._note(error)
            raise

    def end(self) -> None:
        """Raise the refused error, if the model's code caught one."""
        if self.error is not None:
            self.is_caught = True
            raise self.error

    def _note(self, error: Exception) -> None:
        if self.error is None:
            self.error, self.place = error, self._place()

    def _raises_in_eager(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an op raises on real tensors, too; False where that cannot be tried."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        namespace = getattr(func, "namespace", "")
        if "c10d" in namespace or not all(isinstance(x, torch.Tensor) or compat.is_plain(x) for x in leaves):
            return False
        if any(map(is_dtensor, leaves)):  # whose other parts are not here
            return False
        reals = [self._real(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        with compat.no_modes(), torch.random.fork_rng(devices=[]):
            args, kwargs = pytree.tree_unflatten(reals, spec)
            try:
                func(*args, **kwargs)
            except Exception:  # noqa: BLE001 - whatever it is, eager has it as well
                return True
        return False

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self._value(tensor)
        if value is None:  # one of its layout
            with compat.no_modes():
                length = 1 + sum(
                    step * (n - 1) for n, step in zip(tensor.shape, tensor.stride(), strict=True)
                )
                ones = torch.ones(max(length, 0), dtype=tensor.dtype, device=tensor.device)
                value = ones.as_strided(tensor.shape, tensor.stride())
        with compat.no_modes(), torch.enable_grad():
            leaf = copy.deepcopy(value.detach()).requires_grad_(tensor.requires_grad)  # of the same strides
            return leaf if tensor.is_leaf else leaf.view_as(leaf)
