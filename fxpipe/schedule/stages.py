"""Vocabulary stages beside the model's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fxpipe.strict import between


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary stages: shards of the input embedding before the model's stages, of the output layer
    behind them; none of either, or one a rank.

    ``barriers``: a microbatch.  For each, a rank may hold one microbatch more than in the plain schedule.
    """

    embedding_shards: int = 0
    output_shards: int = 0
    barriers: Annotated[int, between(0, 2)] = 1

    def placement(self, model_stages: tuple[int, ...]) -> tuple[int, ...]:
        """The rank of every stage, given those of the model's own."""
        return (*range(self.embedding_shards), *model_stages, *range(self.output_shards))
