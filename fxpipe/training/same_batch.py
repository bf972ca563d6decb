"""Compares in every step that all ranks run the same step of the same plan on the same batch.

A rank that was given another batch, say by a DataLoader that shuffles on its own, would pair the inputs of
one batch with the labels of another, and the loss would even fall.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fxpipe.runtime.digest import digest

#: The words that each rank sends: a fixed number, as ranks with different plans must be able to compare them.
WORDS = 64
PLAN, STEP, STOP, LEAVES = 0, 1, 2, 3  # where they begin

ABSENT = 0  # the word of a leaf that the rank was not given


def words(
    plan: int, step: int, stop: bool, leaves: Sequence[str], given: Mapping[str, object]
) -> torch.Tensor:
    """The words of this rank, on the CPU wherever its batch is: a rank that was given no tensor has them too.

    plan: the number of the plan.  stop: whether this rank was asked to end the run.  leaves: the names of the
    batch's tensors; the words of many are added up.
    """
    found = {name: x for name in leaves if isinstance(x := given.get(name), torch.Tensor)}
    own = torch.zeros(WORDS, dtype=torch.int64)
    own[PLAN], own[STEP], own[STOP] = plan, step, int(stop)
    for slot, names in _slots(leaves):
        if found.keys() >= set(names):
            for name in names:
                own[slot] += digest(found[name]).cpu()
    return own


def any_stops(ranks: torch.Tensor) -> bool:
    """Whether a rank was asked to end the run, from the words of all ranks."""
    return bool(ranks[:, STOP].any())


def difference(ranks: torch.Tensor, leaves: Sequence[str]) -> str | None:
    """The first difference between the ranks' words, a row for each, as a message; None if there is none."""
    table: list[list[int]] = ranks.tolist()
    if rank := _other([row[PLAN] for row in table]):
        return f"Rank {rank} has another plan than rank 0. Compile, or load, the same pipeline on all ranks."
    if rank := _other([row[STEP] for row in table]):
        return (
            f"Rank {rank} is in step {table[rank][STEP]}, and rank 0 in step {table[0][STEP]}. All ranks "
            "must run the same steps."
        )
    for slot, names in _slots(leaves):
        first = next((rank for rank, row in enumerate(table) if row[slot] != ABSENT), 0)
        if rank := _other([row[slot] or table[first][slot] for row in table]):
            return (
                f"Rank {rank} has another {' or '.join(map(repr, names))} than rank {first} in step "
                f"{table[0][STEP]}. Give all ranks the same batches in the same order: seed the sampler "
                "alike (a DataLoader that shuffles takes generator=torch.Generator().manual_seed(…)), and do "
                "not divide the data between the ranks of a pipeline, as a DistributedSampler does."
            )
    return None


def _other(values: Sequence[int]) -> int:
    """The first rank with another value than rank 0; 0 if there is none."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), 0)


def _slots(leaves: Sequence[str]) -> list[tuple[int, list[str]]]:
    """The place of each leaf among the words; leaves beyond their number share places."""
    slots: dict[int, list[str]] = {}
    for k, name in enumerate(leaves):
        slots.setdefault(LEAVES + k % (WORDS - LEAVES), []).append(name)
    return [*slots.items()]
