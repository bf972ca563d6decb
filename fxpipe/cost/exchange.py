"""The time in which replicas, and lanes, exchange gradients and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fxpipe.cost.devices.cluster import Cluster
from fxpipe.plan.step import Shard
from fxpipe.schedule.costs import Exchange


class StageTensors(NamedTuple):
    """The bytes of a stage's gradients, of their parameters, and of parameters without gradients; of the
    gradients those that lanes sum."""

    gradients: int
    parameters: int
    frozen: int
    of_lanes: int = 0

    def gathered(self, shard: str | None) -> int:
        """The bytes of the parameters that a replica gets of others."""
        return self.parameters + (self.frozen if shard == "parameters" else 0)


def exchanges(
    cluster: Cluster,
    placement: Sequence[int],
    tensors: Mapping[int, StageTensors],
    lanes: int,
    replicas: int,
    shard: Shard,
    per_use: bool,
    ranks_per_machine: int | None,
) -> tuple[Exchange, ...]:
    """The exchanges of each stage.  tensors: by stage.  per_use: whether replicas have all of them for single
    ops alone.

    In a sum each replica gets its shard of all others, (replicas - 1) / replicas of the bytes in each
    direction, and without shards as much again of the sums; so it is with a gather, and with a sum over the
    lanes, on the link of a machine, which comes before.
    """

    def seconds(stage: int, size: float) -> float:
        link = cluster.link_of_replicas(placement[stage], replicas, ranks_per_machine)
        # As many messages as other replicas, each of a shard.
        return (replicas - 1) * link.seconds(size / replicas) if size else 0.0

    def of_lanes(stage: int, size: float) -> float:
        link = cluster.devices[placement[stage]].intra
        return 2 * (lanes - 1) * link.seconds(size / lanes) if size else 0.0

    by_stage = []
    for stage in range(len(placement)):
        sizes = tensors.get(stage, StageTensors(0, 0, 0))
        once, before = seconds(stage, sizes.gradients), of_lanes(stage, sizes.of_lanes)
        gather = seconds(stage, sizes.gathered(shard))
        # Without shards the sums go back to all, which moves as much again.
        whole = Exchange(before + 2 * once)
        by_stage.append(Exchange(before + once, gather, per_use) if shard else whole)
    return tuple(by_stage)
