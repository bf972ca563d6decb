"""The tensors of a module by their names within it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class within(Mapping[str, _T]):
    """Of ``tensors``, those of a module: ``within(params, "blocks.3")["att.weight"]`` is
    ``params["blocks.3.att.weight"]``."""

    tensors: Mapping[str, _T]
    module: str

    def __getitem__(self, name: str) -> _T:
        return self.tensors[f"{self.module}.{name}"]

    def __iter__(self) -> Iterator[str]:
        start = f"{self.module}."
        return (name.removeprefix(start) for name in self.tensors if name.startswith(start))

    def __len__(self) -> int:
        return sum(1 for _ in self)
