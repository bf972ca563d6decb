"""A recorder of ops and storages for the CPU: what a CUDA graph does on a GPU, with the same blindness.

It records each op that torch runs, with its tensors, and runs them again on the same memory, without the
Python between them.  So a number of the host, a tensor that was replaced, a wait or a copy that the graph
would not have is missing here too.  Memory is not used twice within a tape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.runtime.program.lanes import _OPS
from fxpipe.runtime.ranks import lanes, local

_OF_LANES = {run.__name__.removeprefix("_"): run for run, *_ in _OPS}


class Tape(TorchDispatchMode):
    def __init__(self, device: torch.device, random_ops: int) -> None:
        super().__init__()
        self.random_ops, self.drawn = random_ops, 0
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []
        self._state = torch.default_generator.get_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host reads a tensor while the step is recorded")
        if func.namespace == "lanes":  # a graph has what it starts on the device
            with self:
                return _OF_LANES[func._opname](*args, **kwargs)
        result = func(*args, **kwargs)
        inputs = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        made = [x for x in _tensors(result) if x.untyped_storage()._cdata not in inputs]
        self.calls.append((func, args, kwargs, made))
        return result

    def record(self, run: Callable[[], object]) -> None:
        # Messages in one process hide their copies from a rank's modes; a graph has them.
        with contextlib.ExitStack() as stack:
            for module in (local, lanes):
                stack.enter_context(mock.patch.object(module, "no_modes", contextlib.nullcontext))
            stack.enter_context(self)
            run()
        assert self.drawn == self.random_ops

    def memory(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def draw(self, number: int, op: Callable[[], Any]) -> Any:
        self.drawn += 1
        assert number < self.random_ops
        self.calls.append((_Seed(number), (), {}, []))
        return op()

    @torch.no_grad()
    def replay(self, seeds: Sequence[int]) -> None:
        before = torch.default_generator.get_state()
        for func, args, kwargs, made in self.calls:
            if isinstance(func, _Seed):
                torch.default_generator.manual_seed(seeds[func.number])
                continue
            again = _tensors(func(*args, **kwargs))
            for target, value in zip(made, _new(again, args, kwargs), strict=True):
                target.copy_(value)
        torch.default_generator.set_state(before)


class _Seed:
    def __init__(self, number: int) -> None:
        self.number = number


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]


def _new(results: list[torch.Tensor], args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    inputs = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
    return (x for x in results if x.untyped_storage()._cdata not in inputs)
