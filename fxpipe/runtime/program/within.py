"""The tensors of a module by their names within it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class within(Generic[_T]):
    """The ones of ``tensors`` that are a module's: ``within(params, "blocks.3")["att.weight"]`` is
    ``params["blocks.3.att.weight"]``."""

    tensors: Mapping[str, _T]
    module: str

    def __getitem__(self, name: str) -> _T:
        return self.tensors[f"{self.module}.{name}"]

    def tensors_by_name(self) -> dict[str, _T]:
        """The tensors of the module, by their names within it."""
        start = f"{self.module}."
        names = (name for name in self.tensors if name.startswith(start))
        return {name.removeprefix(start): self.tensors[name] for name in names}
