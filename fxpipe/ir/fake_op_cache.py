"""Runs ops on fake tensors: of those on the same layouts, as in the layers of a model, all but the first take
a third of the time.

torch knows the results of fake ops, too, but has to ask for all that an op may do before it looks them up.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from fxpipe.ir import compat
from fxpipe.ir.compat import FakeTensor
from fxpipe.runtime.torch_private import storage_number


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Tensor:
    """A result in new memory, or in that of the op's tensor with the number ``base``."""

    mode: Any
    layout: _Layout
    base: int | None

    def made(self, tensors: list[FakeTensor]) -> FakeTensor:
        return compat.fake_tensor(self.mode, *self.layout, None if self.base is None else tensors[self.base])


_Result = _Tensor | int | tuple[_Tensor | None, ...] | list[_Tensor | None]
"""As the op gives it, or the number of the tensor that it returns."""


class SameLayouts:
    """The results of ops by the layouts of their arguments, each with what a graph says of it; None for ops
    that are run each time."""

    def __init__(self, known: dict[object, Any] | None = None) -> None:
        self._known: dict[object, tuple[_Result, object] | None] = {} if known is None else known

    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[object, object]:
        """The result of an op that reads no data, and writes to nothing or to what it returns; it is not
        recorded in a trace.  And the value of its node: one for all ops on the same layouts, which tells
        no node (``give_own_values``)."""
        tensors: list[FakeTensor] = []
        key = func, _form(args, tensors), _form(tuple(kwargs.items()), tensors)
        known = self._known.get(key)
        if known is not None:
            return _made(known[0], tensors), known[1]
        before = [_form(x, []) for x in tensors]
        with compat.untraced():
            result = func(*args, **kwargs)
        value = compat.node_value(result)
        if key not in self._known:
            is_same = before == [_form(x, []) for x in tensors]
            layouts = _known(func, result, tensors) if is_same else None
            self._known[key] = None if layouts is None else (layouts, value)
        return result, value


def give_own_values(graph: fx.Graph) -> None:
    """Give each node a value of its own, for readers that tell nodes apart by their tensors."""
    for node in graph.nodes:
        if node.op != "call_function" or "val" not in node.meta:  # of a check, for example
            continue
        if node.target is operator.getitem:
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]
        else:
            copies = compat.pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, node.meta["val"])
            node.meta["val"] = copies


def _made(known: _Result, tensors: list[FakeTensor]) -> object:
    if isinstance(known, _Tensor):
        return known.made(tensors)
    if isinstance(known, int):
        return tensors[known]
    kind: Any = type(known)
    return kind(None if x is None else x.made(tensors) for x in known)


def _form(value: object, tensors: list[FakeTensor]) -> object:
    """Equal for arguments that differ in the elements of tensors alone; the tensors are added to a list."""
    if isinstance(value, FakeTensor):
        tensors.append(value)
        if value.layout is not torch.strided:
            return value.layout  # of an op that is run each time
        bits = value.is_conj(), value.is_neg(), value.requires_grad, value.constant is None
        return *_layout(value), *bits, value.untyped_storage().nbytes()
    if isinstance(value, (tuple, list)):
        return type(value), *[_form(each, tensors) for each in value]
    return type(value), value  # 1, 1.0 and True are equal


def _layout(tensor: torch.Tensor) -> _Layout:
    return _Layout(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)


def _known(func: Any, result: Any, tensors: list[FakeTensor]) -> _Result | None:
    constants = [x.constant is not None for x in tensors]
    reads_constants = any(constants) and (all(constants) or torch.Tag.dynamic_output_shape in func.tags)
    if reads_constants or any(x.layout is not torch.strided for x in tensors):
        return None
    returned = next((k for k, x in enumerate(tensors) if x is result), None)
    if returned is not None:
        return returned
    if isinstance(result, torch.Tensor):
        return _as_made(result, tensors)
    parts = [None if x is None else _as_made(x, tensors) for x in result]
    if any(a is not None and b is None for a, b in zip(result, parts, strict=True)):
        return None
    new = [storage_number(x) for x, part in zip(result, parts, strict=True) if part and part.base is None]
    return type(result)(parts) if len({*new}) == len(new) else None


def _as_made(result: torch.Tensor, tensors: list[FakeTensor]) -> _Tensor | None:
    """The result as ``_Tensor`` makes it; None if that is something else."""
    if type(result) is not FakeTensor or result.layout is not torch.strided or result.constant is not None:
        return None
    storages = [storage_number(x) for x in tensors]
    memory = storage_number(result)
    base = storages.index(memory) if memory in storages else None
    results = _Tensor(result.fake_mode, _layout(result), base)
    if any(result is x for x in tensors):
        return None
    return results if _form(results.made(tensors), []) == _form(result, []) else None
