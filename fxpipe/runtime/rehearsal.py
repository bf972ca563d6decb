"""Compiles the functions of a program before its first step.

Their first calls would compile them inside the step, where other ranks wait, and for longer than their time
limit.  So the program runs once on fake tensors, which have a layout and no data, until it has called each.
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
    Warns of functions that the first step itself will compile, as an edited ``step`` may need data.  Raises
    RunError as ``inductor.prepare`` does.
    """
    functions = compiled_functions(step)
    if not isinstance(step, FunctionType) or not functions:
        return
    ahead = dict(functions)  # not called yet
    compiled = {}

    def rehearsed(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if function := ahead.pop(name, None):
                compiled[name] = function.prepare(*args)
            return compiled[name].fake_results()

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
        except Exception as error:  # noqa: BLE001 - an edited step may raise anything
            warnings.warn(
                f"The first step will compile {', '.join(sorted(ahead))}, and the other ranks wait for it: "
                f"the program cannot run without data ({type(error).__name__}: {error}).",
                stacklevel=2,
            )


class _AllCompiled(Exception):
    """Ends the rehearsal."""


class _Rehearsal:
    """``rt`` for a program on fake tensors: messages arrive at once, and methods without a result do nothing.

    ``ahead``: the functions that are not compiled yet.
    """

    def __init__(
        self,
        rank: int,
        spec: StepSpec,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        gradients: Iterable[str],
        device: torch.device,
        ahead: Mapping[str, inductor],
    ) -> None:
        self._spec, self._needed, self._device, self._ahead = spec, spec.leaves_of(rank), device, ahead
        self.params, self.buffers, self.constants = (
            {name: self._empty((t.shape, t.stride(), t.dtype)) for name, t in tensors[kind].items()}
            for kind in ("params", "buffers", "constants")
        )
        self.grads = {name: torch.zeros_like(self.params[name]) for name in gradients}

    def op(self, name: str) -> None:
        if not self._ahead:
            raise _AllCompiled

    def microbatches(self, batch: Any) -> list[dict[str, torch.Tensor]]:
        leaves = {}
        for leaf in self._spec.batch.leaves:
            if leaf.shape is not None and leaf.name in self._needed:
                dtype = getattr(torch, leaf.dtype.removeprefix("torch."))
                leaves[leaf.name] = self._empty((leaf.shape, leaf.stride, dtype))
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
