"""The time in which replicas exchange gradients and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxpipe.cost.cluster import Cluster
from fxpipe.plan.step import Shard
from fxpipe.schedule.costs import Exchange


def exchanges(
    cluster: Cluster,
    placement: Sequence[int],
    bytes: Mapping[int, tuple[float, float]],
    replicas: int,
    shard: Shard,
    per_use: bool,
    ranks_per_machine: int | None,
) -> tuple[Exchange, ...]:
    """The exchanges of each stage.  bytes: by stage, of its gradients and of their parameters.  per_use:
    whether replicas have all of them for single ops alone.

    In a sum each replica gets its shard of all others, (replicas - 1) / replicas of the bytes in each
    direction, and without shards as much again of the sums; so it is with a gather.
    """

    def seconds(stage: int, size: float) -> float:
        link = cluster.link_of_replicas(placement[stage], replicas, ranks_per_machine)
        return (replicas - 1) * link.seconds(size / replicas) if size else 0.0

    found = []
    for stage in range(len(placement)):
        gradients, parameters = bytes.get(stage, (0.0, 0.0))
        once = seconds(stage, gradients)
        whole = Exchange(2 * once)
        found.append(Exchange(once, seconds(stage, parameters), per_use) if shard else whole)
    return tuple(found)
