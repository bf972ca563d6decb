"""Errors speak of memory in the user's units, and name what a rank holds beside activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.schedule.units import PLAIN, Units

#: What ``beside`` is the memory of.
WEIGHTS = "parameters, gradients, buffers and outputs"


@dataclass(frozen=True)
class MemoryText:
    """The words of errors on memory.  ``beside``: per rank the memory that it holds throughout, which is in
    no limit of activations; empty where there is none."""

    units: Units = PLAIN
    beside: tuple[float, ...] = ()

    def of(self, rank: int) -> float:
        return self.beside[rank] if self.beside else 0.0

    def needs(self, amount: float, rank: int, limit: float) -> str:
        """The activations that a rank needs, and the limit for them: ``3 of memory on rank 0, and the limit
        is 2``."""
        needed, left = self.units.memory(amount), self.units.memory(limit)
        if not self.beside:
            return f"{needed} of memory on rank {rank}, and the limit is {left}"
        weights = self.units.memory(self.of(rank))
        return (
            f"{needed} for activations on rank {rank}, where the memory limit of "
            f"{self.units.memory(limit + self.of(rank))} leaves {left} beside {weights} of {WEIGHTS}"
        )

    def whole(self, amounts: Sequence[float]) -> float:
        """The memory of the rank that needs the most, with what it holds beside activations."""
        return max(amount + self.of(rank) for rank, amount in enumerate(amounts))

    def enough(self, amounts: Sequence[float]) -> str:
        """The limit that these activations keep, as exact as it must be."""
        return self.units.limit(self.whole(amounts))

    def limit(self, limits: Sequence[float]) -> str:
        """The tightest limit of all that a rank holds."""
        return self.units.memory(min(limit + self.of(rank) for rank, limit in enumerate(limits)))


ANY_UNIT = MemoryText()
"""Activations alone, in any one unit."""
