"""The meshes that were compared for a plan: ranks, replicas, and what replicas divide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fxpipe.plan.step import MOST_RANKS, Shard
from fxpipe.schedule.candidate_row import Recompute
from fxpipe.strict import NonNegative, at_least, between


@dataclass(frozen=True)
class Mesh:
    """``replicas`` pipelines of ``ranks`` each; ``microbatches`` of each replica.  ``lanes``: of each rank,
    where numbers of them are compared.  ``way``: the name of how the model is distributed over them, where
    several ways are."""

    ranks: Annotated[int, between(1, MOST_RANKS)]
    replicas: Annotated[int, between(1, MOST_RANKS)]
    microbatches: Annotated[int, at_least(1)]
    shard: Shard = ""
    lanes: Annotated[int, between(1, MOST_RANKS)] = 1
    way: str = ""

    @property
    def divides_parameters(self) -> bool:
        return self.shard == "parameters"

    def __str__(self) -> str:
        """The text is like ``8 x 4 optimizer``: ranks, replicas, several lanes, the way, what is divided."""
        return f"{self.size} {self.shard}".rstrip()

    @property
    def size(self) -> str:
        numbers = (self.ranks, self.replicas, self.lanes)[: 2 + (self.lanes > 1)]
        return f"{' x '.join(map(str, numbers))} {self.way}".rstrip()


@dataclass(frozen=True)
class TriedMesh:
    """A mesh with its simulated step, or the reason that it was left out.

    ``seconds`` a step.  ``memory``: bytes of the rank that needs the most: parameters, gradients, buffers,
    activations, and the optimizer's state if its bytes were given.  ``schedule``, ``stages_per_rank``,
    ``recompute``: those of the step.
    Left out are meshes that cannot be faster than another one by a hundredth (``bound``: seconds that no
    schedule beats), that do not keep the memory limit (``memory``: what they need or more, without
    ``seconds``), and that are impossible (``why``).
    """

    mesh: Mesh
    seconds: NonNegative | None = None
    memory: NonNegative | None = None
    schedule: str = ""
    stages_per_rank: Annotated[int, at_least(0)] = 0
    recompute: Recompute = ""
    bound: NonNegative | None = None
    why: str = ""
