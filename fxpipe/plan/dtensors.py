"""A model's DTensors, as torch's ``parallelize_module`` makes them, and the part of each that is here.

Nothing is imported for a model without DTensors.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_dtensor_type(kind: type) -> bool:
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and issubclass(kind, known.DTensor)


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor, or a parameter, is a DTensor."""
    return is_dtensor_type(type(tensor))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this process holds, without a gradient's history; or the tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    wrapper: Any = tensor
    (name, *_), _ = wrapper.__tensor_flatten__()  # to_local() gives a view of a parameter's
    found: torch.Tensor = getattr(tensor, name)
    return found
