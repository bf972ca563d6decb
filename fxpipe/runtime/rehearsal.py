"""Compiles the functions of a program before its first step.

Their first calls would compile them in the step, where other ranks wait, for longer than their time limit.  So the
program runs once on fake tensors, which have layouts and no data, up to the point where every function was called.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch

from fxpipe.errors import FxpipeError
from fxpipe.runtime.comm import Layout
from fxpipe.runtime.inductor import inductor
from fxpipe.runtime.rank import StepSpec
from fxpipe.runtime.torch_private import fake_tensors


class _AllCompiled(Exception):
    pass


def compiled_functions(step: Callable[..., Any]) -> dict[str, inductor]:
    """The functions beside the ``step`` of a program that Inductor compiles, by name."""
    given = step.__globals__ if isinstance(step, FunctionType) else {}
    return {name: value for name, value in given.items() if isinstance(value, inductor)}


def compile_functions(
    step: Callable[..., Any],
    rank: int,
    spec: StepSpec,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    gradients: Iterable[str],
    device: torch.device,
) -> None:
    """Compile the functions of a program for the layouts that they get in ``step``.

    tensors: params, buffers and constants of the rank.  gradients: the names of the parameters that have one.
    An edited ``step`` that needs data compiles them itself; then a warning says so.  Raises RunError as
    ``inductor.prepare`` does.
    """
    functions = compiled_functions(step)
    if not isinstance(step, FunctionType) or not functions:
        return
    ahead = dict(functions)  # not called yet

    def rehearsed(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if function := ahead.pop(name, None):
                function.prepare(*args)
            return functions[name].function(*args)

        return call

    namespace = step.__globals__ | {name: rehearsed(name) for name in functions}
    with fake_tensors():
        rt = _Rehearsal(rank, spec, tensors, gradients, device, ahead)
        try:
            FunctionType(step.__code__, namespace)(rt, None)
        except _AllCompiled:
            pass
        except FxpipeError:
            raise
        except Exception as error:  # an edited step may raise anything
            warnings.warn(
                f"The first step will compile {', '.join(sorted(ahead))}, and other ranks wait for it: without data "
                f"the program fails. {type(error).__name__}: {error}",
                stacklevel=2,
            )


class _Rehearsal:
    """``rt`` for a program on fake tensors: messages arrive at once, and what has no result does nothing."""

    def __init__(
        self,
        rank: int,
        spec: StepSpec,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        gradients: Iterable[str],
        device: torch.device,
        ahead: Mapping[str, Any],
    ) -> None:
        self._rank, self._spec, self._device, self._ahead = rank, spec, device, ahead
        self.params, self.buffers, self.constants = (
            {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for name, t in of.items()}
            for of in (tensors["params"], tensors["buffers"], tensors["constants"])
        )
        self.grads = {name: torch.zeros_like(self.params[name]) for name in gradients}

    def op(self, name: str) -> None:
        if not self._ahead:
            raise _AllCompiled

    def microbatches(self, batch: Any) -> list[dict[str, torch.Tensor]]:
        needed = self._spec.leaves_of(self._rank)
        leaves = {
            leaf.name: self._empty((leaf.shape, leaf.stride, getattr(torch, leaf.dtype.removeprefix("torch."))))
            for leaf in self._spec.batch.leaves
            if leaf.shape is not None and leaf.name in needed
        }
        return [leaves] * self._spec.microbatches

    def key(self, microbatch: int) -> torch.Tensor:
        return torch.empty((), dtype=torch.int64)

    def receive(self, layouts: Layout | list[Layout], source: int) -> list[Layout]:
        return layouts if isinstance(layouts, list) else [layouts]

    def broadcast(self, tensor: Any, layout: Layout, source: int, group: int) -> list[Layout]:
        return [layout]

    def gather(self, tensor: Any, layout: Layout, to: int, group: int) -> list[Layout]:
        return [layout] * self._spec.ranks

    def all_gather(self, tensor: Any, layout: Layout, group: int) -> list[Layout]:
        return [layout] * self._spec.ranks

    def wait(self, pending: list[Layout]) -> torch.Tensor:
        (tensor,) = self.wait_all(pending)
        return tensor

    def wait_all(self, pending: list[Layout]) -> list[torch.Tensor]:
        return [self._empty(layout) for layout in pending]

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def _empty(self, layout: Layout) -> torch.Tensor:
        shape, stride, dtype = layout
        return torch.empty_strided(shape, stride, dtype=dtype, device=self._device)
