"""Parameters in other dtypes, which a program computes once a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxpipe.ir.graph import Kind, Value


@dataclass(frozen=True)
class Cast:
    """A parameter, or rows of one, in another dtype; as text ``"lm_head.weight as bfloat16"``."""

    parameter: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.parameter} as {str(self.dtype).removeprefix('torch.')}"


def cast_of(name: str) -> Cast:
    """Parse the name of an input of ``Kind.CAST``."""
    parameter, _, dtype = name.rpartition(" as ")
    return Cast(parameter, getattr(torch, dtype))


def parameter_of(value: Value) -> str | None:
    """The name of the parameter that a value is, or is the cast of; None for other values."""
    if value.kind is Kind.CAST:
        return cast_of(value.name).parameter
    return value.name if value.kind is Kind.PARAMETER else None
