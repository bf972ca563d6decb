"""A device that is not there: tensors that say they are on an accelerator, and are computed on the CPU.

As in torch, an op needs all its tensors on one device, but for 0-d ones of the CPU.  A collective on a tensor
of the stand-in is an error: nothing but messages of steps may go over the backend of accelerators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

DEVICE = torch.device("lazy", 0)  # a kind that torch does not try to start


class StandIn(torch.Tensor):
    """``of``: the same numbers on the CPU."""

    of: torch.Tensor

    @staticmethod
    def __new__(cls, of: torch.Tensor) -> StandIn:
        found = torch.Tensor._make_wrapper_subclass(
            cls, of.shape, strides=of.stride(), dtype=of.dtype, device=DEVICE
        )
        found.of = of
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _on_device(func, args, kwargs or {})


class Device(TorchDispatchMode):
    """While entered, the stand-in is there: tensors can be moved to it and back."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _on_device(func, args, kwargs or {})


def _on_device(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    on_it = [x for x in given if isinstance(x, StandIn)]
    assert not (on_it and func.namespace == "c10d"), f"{func} on a tensor of {DEVICE}"
    target = kwargs.get("device")
    moves = func is torch.ops.aten._to_copy.default or func is torch.ops.aten.copy_.default
    if on_it and not moves:
        mixed = [x for x in given if not isinstance(x, StandIn) and x.dim()]
        assert not mixed, f"{func} on tensors of {DEVICE} and of the CPU"
    result_on_it = bool(on_it) if target is None else torch.device(target).type == DEVICE.type
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = pytree.tree_map_only(StandIn, lambda x: x.of, (args, kwargs))
    with _disable_current_modes():
        result = func(*args, **kwargs)
    return pytree.tree_map_only(torch.Tensor, StandIn, result) if result_on_it else result
