"""The time in which replicas, and lanes, exchange gradients and parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fxpipe.cost.devices.cluster import Cluster
from fxpipe.plan.step import Shard
from fxpipe.schedule.costs import Exchange


class Bytes(NamedTuple):
    """The bytes of tensors: ``whole``, and of the ``part`` that a lane has where lanes divide them."""

    whole: int
    part: float

    @staticmethod
    def of(tensors: Iterable[tuple[int, int]]) -> Bytes:
        """tensors: the bytes of each, and the number of lanes that may divide it."""
        tensors = [*tensors]
        return Bytes(sum(size for size, _ in tensors), sum(size / lanes for size, lanes in tensors))

    def and_of(self, other: Bytes) -> Bytes:
        return Bytes(self.whole + other.whole, self.part + other.part)

    @property
    def of_others(self) -> float:
        """The bytes that a lane has not."""
        return self.whole - self.part


NO_BYTES = Bytes(0, 0.0)


class StageTensors(NamedTuple):
    """The bytes of a stage's gradients, of their parameters, and of parameters without gradients; of the
    gradients those that lanes sum."""

    gradients: Bytes = NO_BYTES
    parameters: Bytes = NO_BYTES
    frozen: Bytes = NO_BYTES
    of_lanes: Bytes = NO_BYTES

    def gathered(self, shard: str | None) -> Bytes:
        """The bytes of the parameters that a process gets of others."""
        return self.parameters.and_of(self.frozen) if shard == "parameters" else self.parameters


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
    """The exchanges of each stage.  tensors: by stage.  per_use: whether processes have all of them for
    single ops alone.

    In a sum each replica gets its shard of all others, (replicas - 1) / replicas of the bytes in each
    direction, and without shards as much again of the sums; so it is with a gather, and with a sum over the
    lanes, on the link of a machine, which comes before.  Of what lanes divide, replicas exchange a part.
    """

    def seconds(stage: int, size: float) -> float:
        link = cluster.link_of_replicas(placement[stage], replicas, ranks_per_machine)
        # As many messages as other replicas, each of a shard.
        return (replicas - 1) * link.seconds(size / replicas) if size else 0.0

    def between_lanes(stage: int, sizes: Bytes) -> float:
        link = cluster.devices[placement[stage]].intra
        others = max(1, lanes - 1)
        return others * link.seconds(sizes.of_others / others) if sizes.of_others else 0.0

    by_stage = []
    for stage in range(len(placement)):
        sizes = tensors.get(stage, StageTensors())
        before, gathered = between_lanes(stage, sizes.of_lanes), sizes.gathered(shard)
        if shard:
            gather = seconds(stage, gathered.part) + between_lanes(stage, gathered)
            once = before + seconds(stage, sizes.gradients.part)
            by_stage.append(Exchange(once, gather, per_use))
        else:  # the sums go back to all, which moves as much again
            by_stage.append(Exchange(2 * before + 2 * seconds(stage, sizes.gradients.whole)))
    return tuple(by_stage)
