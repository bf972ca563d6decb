"""Plain values of Python, without state and identity: a program does the same with them in every run."""

from __future__ import annotations

from types import EllipsisType, NoneType
from typing import Any

import torch

ATOMS = (NoneType, EllipsisType, bool, bytes, complex, float, int, str,
         torch.device, torch.dtype, torch.layout, torch.memory_format)  # fmt: skip


class NotPlain(TypeError):
    """A value may change, or may be told from an equal one."""


def form_of(value: Any) -> Any:
    """Equal for two values where no program can tell one from the other: 1, 1.0 and True differ, 0.0 and -0.0
    too.  Raises NotPlain."""
    kind = type(value)
    if kind in (float, complex):
        return kind, repr(value)
    if kind in ATOMS:
        return kind, value
    if kind in (tuple, torch.Size):
        return kind, *map(form_of, value)
    if kind in (range, slice):
        return kind, *(form_of(each) for each in (value.start, value.stop, value.step))
    raise NotPlain(f"a {kind.__name__}")
