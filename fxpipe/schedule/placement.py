"""Placements: the rank of each stage."""

from __future__ import annotations

from fxpipe.errors import ScheduleError


def plain(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Round robin: stage s on rank s mod p."""
    return tuple(range(ranks)) * stages_per_rank


def v_shape(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stages go down the ranks and back up: 0 … p-1, p-1 … 0 (2405.15362); more stages go on in zigzag."""
    down = tuple(range(ranks))
    return tuple(rank for chunk in range(stages_per_rank) for rank in (down[::-1] if chunk % 2 else down))


PLACEMENTS = {"plain": plain, "v": v_shape}


def place(name: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The placement called ``name``: stage -> rank.

    Raises ScheduleError, listing the known ones, for another name.
    """
    if name not in PLACEMENTS:
        raise ScheduleError(f"unknown placement {name!r}; known: {', '.join(sorted(PLACEMENTS))}")
    return PLACEMENTS[name](ranks, stages_per_rank)


def name_of(placement: tuple[int, ...], ranks: int) -> str:
    """The name of a placement; "" for one that has none."""
    chunks = len(placement) // ranks
    return next((name for name in PLACEMENTS if place(name, ranks, chunks) == placement), "")


def stages_of(placement: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank, in model order."""
    stages: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        stages[rank].append(stage)
    return tuple(map(tuple, stages))
