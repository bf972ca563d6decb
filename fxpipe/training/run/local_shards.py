"""Processes that own rows of parameters, all in this process.

Each has memory of its own for whole parameters, in which the rows of others are NaN until they are gathered:
a program that reads them too early gives other numbers, as it does under torchrun.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fxpipe.plan.artifact import Plan
from fxpipe.plan.lanes import ONE_LANE
from fxpipe.plan.rows import ShardName
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.program.replicas import Accumulators, Bucket
from fxpipe.runtime.ranks.local import LocalWorld
from fxpipe.runtime.ranks.local_replicas import LocalReplicas, LocalShards
from fxpipe.training.model.accumulators import Place, sharded_buckets
from fxpipe.training.model.model_state import ModelState
from fxpipe.training.model.shards import summing_lanes


def divide(rt: Runtime, state: ModelState, world: LocalWorld, replica: int, lane: int) -> None:
    """Give a runtime, before a step, the rows that its process owns, and what it exchanges with the others.

    state: of its lane.
    """
    place, plan = Place(world.replicas, replica, rt.rank, lane), state.plan
    # Without its rows: those of all processes are no parameters of this one.
    rt.buckets = buckets = sharded_buckets(replace(state, rows={}), place)
    for bucket in buckets:
        if plan.shard == "parameters":
            for name in bucket.names:
                del rt.params[name]
            continue
        bucket.parameters = tuple(_own_rows_alone(bucket, *named) for named in _named(bucket))
        rt.params |= dict(zip(bucket.names, bucket.parameters, strict=True))
    rt.grads = Accumulators([bucket for bucket in buckets if not bucket.is_frozen])
    rt.replicas = LocalReplicas(world, rt.rank, replica, lane)
    lanes = [ONE_LANE, *summing_lanes(plan)]
    rt.shards = {each: LocalShards(world, rt.rank, replica, lane, each) for each in lanes}


def _named(bucket: Bucket) -> Iterator[tuple[ShardName, torch.Tensor]]:
    return zip(bucket.names, bucket.parameters, strict=True)


def _own_rows_alone(bucket: Bucket, name: ShardName, value: torch.Tensor) -> torch.Tensor:
    stale = torch.full_like(value, torch.nan if value.is_floating_point() or value.is_complex() else 0)
    for piece in bucket.pieces:
        if piece.name == name:
            stale.copy_(value)
        elif name.contains(piece.name):
            rows = slice(piece.name.begin - name.begin, piece.name.end - name.begin)
            stale[rows].copy_(value[rows])
    return stale


def gradients(plan: Plan, world: LocalWorld, runtimes: Sequence[Runtime]) -> dict[str, torch.Tensor]:
    """The gradients of all ranks, whole, by the names of parameters or of the rows that a rank holds.

    runtimes: of all processes.  All replicas have the same sums.
    """
    whole, lanes = plan.lanes.joined, range(world.lanes)
    by_name: dict[str, torch.Tensor] = {}
    # In reverse, as the first rank that holds a tied weight has its sum.
    for rank in reversed(range(world.ranks)):
        of_replicas = [
            [runtimes[world.number(rank, replica, lane)] for lane in lanes]
            for replica in range(world.replicas)
        ]
        of_lanes = [_of_lane(of_replicas, lane) for lane in lanes]
        by_name |= {name: whole(name, [each[name] for each in of_lanes]) for name in of_lanes[0]}
    return by_name


def _of_lane(of_replicas: Sequence[Sequence[Runtime]], lane: int) -> dict[str, torch.Tensor]:
    first = of_replicas[0][lane]
    if not first.shards:
        return first.grads
    grads: dict[str, torch.Tensor] = {}
    for number, bucket in enumerate(first.buckets):
        owners = [
            each[k].buckets[number] for k in bucket.division.lanes.members(lane) for each in of_replicas
        ]
        parts = [owner.summed for owner in owners if owner.summed is not None]
        if not bucket.is_frozen and len(parts) == len(owners):
            grads |= bucket.views(torch.cat(parts))
    return grads
