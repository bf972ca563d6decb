"""Tensors of a model that its pipeline has on other ranks: their memory is free, and each use is an error.

A rank trains what it holds, and the same module's other tensors would keep the values that they had.  Such a
tensor stays the same object, of its shape, dtype and device, since optimizers and lists of the user may have
it; its class says that it is elsewhere, and its memory is that of one NaN, or of the least integer.  Those
few functions of torch that ask no class (``torch.tensor``, ``torch.func.grad``, TorchScript) read that.
"""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any, ClassVar, Protocol

import torch

from fxpipe.errors import RunError
from fxpipe.plan.artifact import TensorLayout
from fxpipe.plan.dtensors import is_dtensor, local, set_local
from fxpipe.runtime.torch_private import OF_TRANSFORMS, of_base_class, pytree


class Explain(Protocol):
    """Finds the text of an error for a tensor that is elsewhere.  ``number``: of the pipeline that has it.
    ``gradient_is_read``: by the code that runs in a frame.  ``is_written_there``: whether those that have a
    tensor write to it as this process does, so that here there is nothing to do."""

    number: int

    def __call__(self, tensor: torch.Tensor, /) -> str: ...

    def gradient_is_read(self, tensor: torch.Tensor, frame: FrameType) -> None: ...

    def is_written_there(self, tensor: torch.Tensor) -> bool: ...


class Classes:
    """The classes of tensors that are elsewhere for one reason."""

    def __init__(self, explain: Explain):
        self._explain = explain
        self._made: dict[type[torch.Tensor], type[Elsewhere]] = {}

    def of(self, tensor: torch.Tensor) -> type[Elsewhere]:
        kind = type(tensor)
        if kind not in self._made:
            self._made[kind] = type(
                kind.__name__, (Elsewhere, kind), {"kind": kind, "explain": self._explain}
            )
        return self._made[kind]


class Elsewhere(torch.Tensor):
    """The first base of a tensor's class as long as another rank has its values: it tells its shape, takes
    flags, and has no gradient."""

    kind: ClassVar[type[torch.Tensor]]
    explain: ClassVar[Explain]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func == _GRADIENT:
            cls.explain.gradient_is_read(args[0], sys._getframe(1))
        if func in _READS_NO_VALUES and not sys._getframe(1).f_code.co_filename.startswith(OF_TRANSFORMS):
            with of_base_class():
                return func(*args, **(kwargs or {}))
        first, *others = (x for x in pytree.tree_leaves((args, kwargs or {})) if is_elsewhere(x))
        if func in _WRITES and first is args[0] and not others and cls.explain.is_written_there(first):
            return first
        raise RunError(cls.explain(first))

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"<{self.kind.__name__} of shape {(*self.shape,)} on other ranks>"


_T: Any = torch.Tensor
_GRADIENT = _T.grad.__get__
_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "grad", "grad_dtype",
    "grad_fn", "is_leaf", "retains_grad", "is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized",
    "is_nested", "_version", "_grad", "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
    "requires_grad_", "__len__",
)  # fmt: skip
#: What may be asked of a tensor that is elsewhere: scripts count parameters, freeze them, look for devices,
#: and make other tensors of the same shape.
_READS_NO_VALUES = {
    *(getattr(_T, name).__get__ for name in _PROPERTIES),
    *(getattr(_T, name) for name in _METHODS),
    *(getattr(_T, name).__set__ for name in ("requires_grad", "grad")),
    torch.is_floating_point, torch.is_complex, torch.numel, torch.empty_like, torch.zeros_like,
    torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
}  # fmt: skip
#: Writes that draw no random numbers, which every rank is to draw alike.
_WRITES = {
    getattr(_T, name) for name in (
        "add_", "clamp_", "copy_", "div_", "fill_", "lerp_", "mul_", "sub_", "zero_",
        "__iadd__", "__imul__", "__isub__", "__itruediv__", "__setitem__",
    )
}  # fmt: skip


def is_elsewhere(tensor: object) -> bool:
    return isinstance(tensor, Elsewhere)


def hide(tensor: torch.Tensor, kind: type[Elsewhere]) -> None:
    """Make each use of a tensor an error, which keeps its memory."""
    tensor.__class__ = kind


def show(tensor: torch.Tensor) -> None:
    """Undo ``hide``."""
    kind: Any = type(tensor)
    if issubclass(kind, Elsewhere):
        tensor.__class__ = kind.kind


def send_away(tensor: torch.Tensor, kind: type[Elsewhere]) -> None:
    """Free the memory of a tensor, and of its gradient; it becomes one of this class."""
    tensor.grad = None
    part = local(tensor)
    _set_memory(tensor, _no_value(part.dtype, part.device).expand(part.shape))
    hide(tensor, kind)


def bring_back(tensor: torch.Tensor, layout: TensorLayout) -> None:
    """Give a tensor that is elsewhere memory of its own again, without values.  layout: of what is here."""
    device = tensor.device
    show(tensor)
    _set_memory(tensor, layout.empty(device))


def _no_value(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A number that no one takes for a value."""
    number: float | int = math.nan
    if not (dtype.is_floating_point or dtype.is_complex):
        number = 0 if dtype is torch.bool else torch.iinfo(dtype).min or torch.iinfo(dtype).max
    return torch.full((), number, dtype=dtype, device=device)


def _set_memory(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    if is_dtensor(tensor):
        set_local(tensor, memory)
    else:
        tensor.data = memory
