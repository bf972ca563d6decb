"""Stages in parts: each stage of a placement is cut into parts that follow each other on its rank.

What lanes exchange between two parts, or the parameters that the next one needs, is on its way while ops of
other microbatches run.  To the families of schedules a stage in parts is one stage: their orders are made for
the joined costs, and each op becomes those of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from fxpipe.schedule.costs import Costs, Edge, Exchange, StageCost
from fxpipe.schedule.ops import Color, Op, OpKind, RankOps

_T = TypeVar("_T")

Parts = tuple[int, ...]
"""The number of parts of each stage of the placement; empty where each is one."""


def placement_of_parts(placement: Sequence[int], parts: Parts) -> tuple[int, ...]:
    """The rank of each part."""
    return tuple(rank for rank, number in zip(placement, parts, strict=True) for _ in range(number))


def by_stage(of_parts: Sequence[_T], parts: Parts) -> list[list[_T]]:
    """What each part has, in a list for each stage."""
    rest = iter(of_parts)
    return [[next(rest) for _ in range(number)] for number in parts]


def joined_costs(costs: Costs, parts: Parts) -> Costs:
    """The costs of the stages whose parts have ``costs``, as if no exchange between parts took time."""
    stage_of = [stage for stage, number in enumerate(parts) for _ in range(number)]
    handed = [0.0] * len(parts)
    between: dict[tuple[Color, Color], Edge] = {}
    for edge in costs.edges:
        source, target = stage_of[edge.source.stage], stage_of[edge.target.stage]
        if source == target:
            # At one time it is on its way between two of the parts.
            handed[source] = max(handed[source], edge.bytes)
            continue
        ends = Color(source, edge.source.phase), Color(target, edge.target.phase)
        moved = replace(edge, source=ends[0], target=ends[1])
        between[ends] = _both(between[ends], moved) if ends in between else moved
    each = by_stage(costs.stages, parts)
    return replace(
        costs,
        stages=tuple(_stage(group, more) for group, more in zip(each, handed, strict=True)),
        edges=tuple(between.values()),
        exchanges=tuple(
            Exchange(sum(e.sum for e in group), sum(e.gather for e in group), group[0].per_use)
            for group in (by_stage(costs.exchanges, parts) if costs.exchanges else ())
        ),
    )


def ops_of_parts(ops: RankOps, parts: Parts, costs: Costs) -> RankOps:
    """The order in which each op of a stage is those of its parts, forwards in the order of the model, others
    in reverse.

    costs: of the parts.  Where gradients are exchanged between parts, the B and W of a part are two ops: the
    W runs while what the B gave is on its way.
    """
    apart = any(edge.exchange for edge in costs.edges)
    first = [0]
    for number in parts:
        first.append(first[-1] + number)

    def each(op: Op) -> list[Op]:
        stages = range(first[op.stage], first[op.stage + 1])
        kinds = [OpKind.B, OpKind.W] if apart and op.kind is OpKind.BW else [op.kind]
        in_turn = stages if op.kind is OpKind.F else reversed(stages)
        return [Op(kind, stage, op.microbatch) for stage in in_turn for kind in kinds]

    return tuple(tuple(part for op in rank_ops for part in each(op)) for rank_ops in ops)


def _stage(each: Sequence[StageCost], handed: float) -> StageCost:
    total = {name: sum(getattr(cost, name) for cost in each) for name in StageCost.__slots__}
    total["saved_activations"] += handed
    return StageCost(**total)


def _both(one: Edge, other: Edge) -> Edge:
    """Two edges with the same ends: what they carry, in the time of the longer one."""
    # None stands for the seconds within a machine, which may be the longer ones.
    inter = max(e.seconds if e.inter_seconds is None else e.inter_seconds for e in (one, other))
    is_alike = one.inter_seconds is other.inter_seconds is None
    return replace(
        one,
        bytes=one.bytes + other.bytes,
        seconds=max(one.seconds, other.seconds),
        inter_seconds=None if is_alike else inter,
        exchange=max(one.exchange, other.exchange),
    )
