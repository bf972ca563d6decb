"""The rows of a table that a rank holds, as a parameter with its own name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """Some rows of a parameter; as text ``"lm_head.weight[0:128]"``."""

    table: str
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.table}[{self.begin}:{self.end}]"


def rows_of(name: str) -> Rows | None:
    """Parse the name of rows; None for the name of a whole parameter."""
    match = re.fullmatch(r"(.+)\[([0-9]{1,15}):([0-9]{1,15})\]", name, re.DOTALL)
    return Rows(match[1], int(match[2]), int(match[3])) if match else None


def whole_name(name: str) -> str:
    """The name of the parameter that rows belong to; any other name as it is."""
    rows = rows_of(name)
    return rows.table if rows else name


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Concatenate the rows of each table; other tensors stay."""
    joined: dict[str, torch.Tensor] = {}
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        rows = rows_of(name)
        if rows is None:
            joined[name] = tensor
        else:
            parts.setdefault(rows.table, []).append((rows.begin, tensor))
    for name, found in parts.items():
        joined[name] = torch.cat([tensor for _, tensor in sorted(found, key=lambda part: part[0])])
    return joined
