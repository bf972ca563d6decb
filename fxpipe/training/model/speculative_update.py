"""An update that a rank makes before it knows whether the gradients of all ranks let it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from fxpipe.errors import RunError
from fxpipe.runtime.torch_private import writes_to
from fxpipe.training.model.rollback import Rollback


@dataclass(eq=False)
class SpeculativeUpdate:
    """An update whose verdict is not known yet.

    ``gathered``: waits for the words of all ranks, of each the number of its gradients, and whether it has
    updated.  ``undo``: None if this rank waits before it updates.  ``grads``: those with which the update is
    made again.  ``zeroes``: whether they are to be zeroed then.  ``begun``: when the update began.
    ``default_dtype``: the caller's, which an update that is made again gets as well.
    """

    gathered: Callable[[], torch.Tensor]
    undo: Rollback | None
    grads: Sequence[torch.Tensor | None]
    zeroes: bool = False
    begun: float = field(default_factory=time.perf_counter)
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    _versions: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Take the tensor as what may not change until the update stands."""
        self._versions.append((name, tensor, writes_to(tensor)))

    def check(self) -> None:
        """Raise RunError if one of those tensors was changed."""
        for name, tensor, version in self._versions:
            if writes_to(tensor) != version:
                raise RunError(
                    f'{name} was changed after optimizer.step(), and with validation="post" that update may '
                    "still have to be made again. Call optimizer.settle() before you change or read "
                    "parameters and gradients between steps."
                )

    @contextmanager
    def taken_back(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> Iterator[None]:
        """Run a block with the optimizer and the parameters' gradients as they were before the update."""
        assert self.undo is not None
        now, dtype = [p.grad for p in parameters], torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            with self.undo.options_of_then(optimizer):
                self.undo.take_back(optimizer)
                set_grads(parameters, self.grads)
                yield
        finally:
            torch.set_default_dtype(dtype)
            set_grads(parameters, now)


def set_grads(parameters: Sequence[Parameter], grads: Sequence[torch.Tensor | None]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        if parameter.grad is not grad:
            set_grad(parameter, grad)


def set_grad(parameter: Parameter, grad: torch.Tensor | None) -> None:
    """Set ``.grad``, of any dtype, which torch wants in ``.grad_dtype``."""
    parameter.grad = None  # or torch refuses the new dtype
    if grad is not None:
        parameter.grad_dtype = grad.dtype
        parameter.grad = grad
