"""Vocabulary stages beside the model's own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """How many vocabulary stages there are before and behind the model's: none, or one a rank.

    ``ahead``: the microbatches that a rank may hold beyond those of the plain schedule, one for each barrier.
    """

    lookups: int = 0
    heads: int = 0
    ahead: int = 1

    def placement(self, model_stages: tuple[int, ...]) -> tuple[int, ...]:
        """The rank of every stage, given those of the model's own."""
        return (*range(self.lookups), *model_stages, *range(self.heads))
