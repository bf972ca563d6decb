"""Settings of a schedule search drawn at random, so that no search can be tuned to them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from fxpipe.schedule.costs import Costs, StageCost, chain


@dataclass(frozen=True)
class Drawn:
    """``limit`` is in microbatches of a rank; each stage saves as much as any other."""

    ranks: int
    microbatches: int
    stages_per_rank: int
    placement: str
    costs: Costs
    limit: float

    @property
    def label(self) -> str:
        uneven = len(set(self.costs.stages)) > 1
        sizes = f"p={self.ranks} m={self.microbatches} {self.stages_per_rank} a rank {self.placement}"
        return f"{sizes}, {self.limit:.3g} M_B{', uneven' if uneven else ''}"


def drawn_settings(count: int, seed: int) -> list[Drawn]:
    """4 to 16 ranks; 1, 2 or 4 stages a rank, plain or in V placement; from 1.5 M_B to twice 1F1B's memory.

    Two thirds have uneven stages.
    """
    random = Random(seed)
    return [_drawn(random) for _ in range(count)]


def _drawn(random: Random) -> Drawn:
    ranks, chunks = random.randint(4, 16), random.choice((1, 2, 4))
    placement = random.choice(("plain", "v")) if chunks > 1 else "plain"
    microbatches = random.randint(ranks, 4 * ranks)
    forward, backward, weight = (random.uniform(*span) for span in ((0.8, 1.2), (0.7, 1.5), (0.4, 1.1)))
    kept, transfer = random.uniform(0.2, 0.8), random.uniform(0.0, 0.08)
    unevenness = random.choice((0.0, 0.1, 0.3))
    stages = []
    for _ in range(ranks * chunks):
        share = random.uniform(1 - unevenness, 1 + unevenness) / chunks
        stages.append(StageCost(forward * share, backward * share, weight * share, 1 / chunks, kept / chunks))
    limit = max(1.5, random.uniform(0.2, 2.0) * ranks)
    return Drawn(ranks, microbatches, chunks, placement, chain(stages, transfer), limit)
