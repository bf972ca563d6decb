"""Live memory: the bytes that each section allocates and frees on its rank."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.schedule.costs import Costs
from fxpipe.schedule.dependencies import index, sections_of


def memory_changes(costs: Costs, placement: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """The changes of the rank's live memory at each section's start, and at its end, in the costs' unit.

    Activations live from the start of F to the end of B, what W needs of them to the end of W.  A value that
    one stage hands to another stage of its rank is live from the end of its producer to the start of its
    consumer.
    """
    sections = len(sections_of(0)) * len(placement)
    at_start, at_end = [0.0] * sections, [0.0] * sections
    for stage, cost in enumerate(costs.stages):
        f, b, w = sections_of(stage)
        at_start[f] = cost.saved_activations
        at_end[b] = cost.saved_for_weight - cost.saved_activations
        at_end[w] = -cost.saved_for_weight
    for edge in costs.edges:
        if placement[edge.source.stage] == placement[edge.target.stage]:
            at_end[index(edge.source)] += edge.bytes
            at_start[index(edge.target)] -= edge.bytes
    return at_start, at_end


def rank_over(memory: Sequence[float], limits: Sequence[float]) -> int | None:
    """The first rank whose memory exceeds its limit by more than rounding."""
    pairs = enumerate(zip(memory, limits, strict=True))
    return next((rank for rank, (most, limit) in pairs if most > limit * (1 + 1e-9)), None)
