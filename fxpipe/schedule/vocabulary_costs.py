"""The costs of vocabulary stages beside the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxpipe.schedule.costs import Costs, Edge, StageCost
from fxpipe.schedule.ops import Color, Phase
from fxpipe.schedule.stages import Vocabulary


def some_stages(costs: Costs, first: int, last: int) -> Costs:
    """The costs of the stages from ``first`` to before ``last``, renumbered from 0."""

    def moved(color: Color) -> Color:
        return Color(color.stage - first, color.phase)

    edges = tuple(
        replace(edge, source=moved(edge.source), target=moved(edge.target))
        for edge in costs.edges
        if first <= edge.source.stage < last and first <= edge.target.stage < last
    )
    exchanges = costs.exchanges[first:last]
    return replace(costs, stages=costs.stages[first:last], edges=edges, link=None, exchanges=exchanges)


def budget_for_model_stages(
    costs: Costs, vocabulary: Vocabulary, limits: Sequence[float]
) -> tuple[float, ...]:
    """The memory of each rank left for the model's stages if the vocabulary stages hold one microbatch."""
    reserved, end = [0.0] * len(limits), len(costs.stages) - vocabulary.output_shards
    for shards in (costs.stages[: vocabulary.embedding_shards], costs.stages[end:]):
        for rank, cost in enumerate(shards):  # one a rank, if there are any
            reserved[rank] += max(cost.saved_activations, cost.saved_for_weight)
    return tuple(limit - shards for limit, shards in zip(limits, reserved, strict=True))


def with_output_shards(
    costs: Costs,
    ranks: int,
    seconds: float,
    barriers: int,
    transfer: float,
    saved: float = 0.0,
    inter_transfer: float | None = None,
) -> Costs:
    """The costs of a model with a sharded output layer: every rank spends ``seconds`` per microbatch on it, a
    third each on the logits and the two gradients, and holds ``saved`` from pass S to pass T.

    transfer, inter_transfer: the seconds of a message within a machine and between two (by default the same).
    """

    def edge(source: Color, target: Color) -> Edge:
        return Edge(source, target, seconds=transfer, inter_seconds=inter_transfer)

    third, last = seconds / 3, len(costs.stages) - 1
    before = 2 * third if barriers == 1 else third
    head = StageCost(before, max(0.0, seconds - third - before), third, saved, saved)
    shards, edges = range(last + 1, last + 1 + ranks), list(costs.edges)
    for shard in shards:
        edges.append(edge(Color(last, Phase.F), Color(shard, Phase.F)))
        others = [Color(other, Phase.B) for other in shards if other != shard]
        edges += [edge(Color(shard, Phase.F), other) for other in others]
        edges.append(edge(Color(shard, Phase.B), Color(last, Phase.B)))
    return replace(costs, stages=(*costs.stages, *(head,) * ranks), edges=tuple(edges))
