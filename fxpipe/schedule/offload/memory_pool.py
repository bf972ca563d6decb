"""The pool of memory for offloaded activations: one per rank, allocated by first fit in schedule order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fxpipe.schedule.ops import Activation, Direction, Schedule, Transfer


@dataclass(frozen=True)
class Pool:
    """The size of the pool, and the offset of each activation in it, in bytes."""

    bytes: int
    offsets: Mapping[Activation, int]


def pools(schedule: Schedule, size_of: Callable[[Transfer], int]) -> tuple[Pool, ...]:
    """The pool of each rank.  size_of: the bytes of an activation that is moved."""
    until = {t.activation: t.end for t in schedule.transfers if t.direction is Direction.IN}
    ends, offsets = [0] * schedule.ranks, [dict[Activation, int]() for _ in range(schedule.ranks)]
    regions: list[list[tuple[int, int, int]]] = [[] for _ in range(schedule.ranks)]  # begin, end, until when
    for transfer in sorted(schedule.transfers, key=lambda t: t.begin):
        if transfer.direction is Direction.IN:
            continue
        rank, size = schedule.placement[transfer.stage], size_of(transfer)
        live = sorted(region for region in regions[rank] if region[2] >= transfer.begin)
        at = 0
        for begin, end, _ in live:
            if at + size <= begin:
                break
            at = max(at, end)
        regions[rank] = [*live, (at, at + size, until[transfer.activation])]
        offsets[rank][transfer.activation] = at
        ends[rank] = max(ends[rank], at + size)
    return tuple(Pool(end, offsets_here) for end, offsets_here in zip(ends, offsets, strict=True))
