"""Compares in every step that all ranks train alike, on the same batch.

A rank that was given another batch, say by a DataLoader that shuffles on its own, would pair the inputs of
one batch with the labels of another, and the loss would even fall.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fxpipe.runtime.job.calls import SPACE
from fxpipe.runtime.job.digest import digest
from fxpipe.training.optimizer.script_changes import UNKNOWN, Change, Kind, different_changes
from fxpipe.training.optimizer.weight_writes import NOTHING, Form, Written

#: The words that each rank sends: a fixed number, as ranks with different plans must be able to compare them.
WORDS = SPACE
#: Of tensors that several ranks hold, the digests that travel in a step.
DIGESTS = 4
#: Where each word is, and the first of several.
PLAN, STOP, REFUSES, ASKED, OPTIONS, UPDATES, ADDED, CALLS, CHANGED, WRITTEN, FORM, NUMBERS = range(12)
FACTOR, LEAST, MOST = range(NUMBERS, NUMBERS + 3)  # float64
SHARED = NUMBERS + 3
LEAVES = SHARED + DIGESTS

ABSENT = 0  # the word of what a rank does not have, or was not given


@dataclass(frozen=True)
class Facts:
    """Facts that a rank knows before a step, beside the batch.

    ``plan``: the number of the plan.  ``stop``: whether this rank was asked to end the run.  ``asked``: the
    number of the outputs that all ranks must ask for alike.  ``options``: that of the optimizer's options.
    ``updates``: those that it has made, and one.  ``added``: the steps whose gradients this one adds to, and
    one.  ``calls``: the number of the order of the optimizer's calls.  ``changed``: what the script has
    changed between the last step and its update.
    ``names``: of tensors that several ranks hold, the same on all ranks, and their ``digests``.
    ``written``: the number of the tensors that the script has changed in a model that is whole, with values.
    ``weights``: what the script has written to the weights that this rank trains, or to their gradients.
    ``refuses``: whether it does not run the step, as the batch, or what is asked for, is wrong.
    """

    plan: int
    stop: bool = False
    asked: int = ABSENT
    options: int = ABSENT
    updates: int = ABSENT
    added: int = ABSENT
    calls: int = ABSENT
    changed: Change = UNKNOWN
    weights: Written = NOTHING
    names: tuple[str, ...] = ()
    digests: tuple[int, ...] = ()
    refuses: bool = False
    written: int = ABSENT


def words(facts: Facts, leaves: Sequence[str], batch: Mapping[str, object]) -> torch.Tensor:
    """The words of this rank, on the CPU wherever its batch is: a rank that was given no tensor has them too.

    leaves: the names of the batch's tensors; the words of many are added up.
    """
    tensors = {name: x for name in leaves if isinstance(x := batch.get(name), torch.Tensor)}
    row = torch.zeros(WORDS, dtype=torch.int64, device="cpu")
    optimizer = facts.options, facts.updates, facts.added, facts.calls, facts.changed.kind
    begin = facts.plan, int(facts.stop), int(facts.refuses), facts.asked
    form = facts.weights.form + len(Form) * facts.weights.to_gradients
    known = *begin, *optimizer, facts.written, form
    row[:NUMBERS] = row.new_tensor(known)
    numbers = facts.changed.factor, facts.weights.least, facts.weights.most
    row[NUMBERS:SHARED] = torch.tensor(numbers, dtype=torch.float64, device="cpu").view(torch.int64)
    row[SHARED : SHARED + len(facts.digests)] = row.new_tensor(facts.digests)
    for slot, names in _slots(leaves):
        if tensors.keys() >= set(names):  # with one missing the sum would differ from that of other ranks
            for name in names:
                row[slot] += digest(tensors[name]).cpu()
    return row


def any_stops(ranks: torch.Tensor) -> bool:
    """Whether a rank was asked to end the run, from the words of all ranks."""
    return bool(ranks[:, STOP].any())


def refusing(ranks: torch.Tensor) -> list[int]:
    """The ranks that do not run the step, from the words of all ranks."""
    return [rank for rank, refuses in enumerate(ranks[:, REFUSES].tolist()) if refuses]


def options_differ(ranks: torch.Tensor) -> bool:
    """Whether the optimizers have different options, from the words of all ranks."""
    return _other_present(ranks[:, OPTIONS].tolist())[0] != 0


def difference(
    ranks: torch.Tensor,
    leaves: Sequence[str],
    step: str = "this step",
    names: Sequence[str] = (),
    replicas: int = 1,
    resolution: float = 0.0,
) -> str | None:
    """The first difference between the ranks' words, a row for each, as a message; None if there is none.

    step: as text.  names: see ``Facts``.  replicas: whose ranks follow each other, with other batches.
    resolution: that of the factors by which the ranks' scripts have multiplied gradients.
    """
    table: list[list[int]] = ranks.tolist()
    if rank := _other([row[PLAN] for row in table]):  # first: with another plan all other words differ
        return f"Rank {rank} has another plan than rank 0. Compile, or load, the same pipeline on all ranks."
    if rank := _other([row[ASKED] for row in table]):
        return (
            f"Rank {rank} asks for other outputs than rank 0 in {step}, or for another rank to have them. "
            "With outputs_on= all ranks must ask alike."
        )
    compared = [(slot, text, "") for slot, text in _OPTIMIZER.items()]
    compared += [(slot, _VALUES, name) for slot, name in enumerate(names, SHARED)]
    for slot, text, name in compared:
        rank, first = _other_present([row[slot] for row in table])
        if rank:
            ours, theirs = table[rank][slot] - 1, table[first][slot] - 1
            return text.format(rank=rank, first=first, own=ours, theirs=theirs, step=step, name=name)
    factors = ranks[:, FACTOR].contiguous().view(torch.float64).tolist()
    changes = [Change(Kind(row[CHANGED]), factor) for row, factor in zip(table, factors, strict=True)]
    if problem := different_changes(changes, resolution, step):
        return problem
    size = len(table) // replicas
    for begin in range(0, len(table), size):
        for slot, several in _slots(leaves):
            rank, first = _other_present([row[slot] for row in table[begin : begin + size]])
            if rank:
                text, name = _BATCH if replicas == 1 else _ROWS, " or ".join(map(repr, several))
                return text.format(rank=begin + rank, first=begin + first, step=step, name=name)
    return None


def weights_of(ranks: torch.Tensor) -> list[Written]:
    """What the scripts of all ranks have written to weights, from their words; or to gradients, where they
    have declared that."""
    bounds: list[list[float]] = ranks[:, [LEAST, MOST]].view(torch.float64).tolist()
    forms = [divmod(word, len(Form)) for word in ranks[:, FORM].tolist()]
    return [
        Written(Form(form), least, most, bool(of))
        for (of, form), (least, most) in zip(forms, bounds, strict=True)
    ]


def all_alike(ranks: torch.Tensor, leaves: Sequence[str], replicas: int) -> bool:
    """Whether all replicas have the same batch, from the words of all ranks."""
    slots = [slot for slot, _ in _slots(leaves)]
    by_replica = ranks[:, slots].view(replicas, -1, len(slots))
    largest, least = by_replica.amax(1), by_replica.amin(1)
    digests = torch.where(largest > 0, largest, least)  # a rank of a replica has it, or ABSENT
    return bool(slots) and bool((digests == digests[0]).all())


SAME_OPTIONS = "Give all ranks the same optimizer, and change its learning rate, or step a scheduler, on all."

#: What differs, and what to do, by word: in numbers of calls, which are one less than the word, and options.
_OPTIMIZER = {
    UPDATES: "Rank {rank} has called step() of its optimizer {own} times, and rank {first} {theirs} times, "
    "before {step}. Call it on all ranks.",
    ADDED: "Rank {rank} adds to the gradients of {own} earlier steps, and rank {first} to those of {theirs}, "
    "in {step}. Call zero_grad() of the optimizer on all ranks. Where parts of a model are to be updated at "
    "other steps than the rest, let one optimizer of all update and zero in each, keep copies of the "
    "gradients that are to wait, set .grad of these to None, and add the copies before their update, with "
    "pipe.optimizer(…, changes_gradients=True).",
    CALLS: "Rank {rank} has called step(), zero_grad(), load_state_dict(), train() or eval() of its "
    "optimizer in another order than rank {first}, before {step}. Make the same calls on all ranks.",
    OPTIONS: "The optimizer of rank {rank} has other options than that of rank {first} in {step}. "
    + SAME_OPTIONS,
    WRITTEN: "Rank {rank} has changed other weights of the model than rank {first} since pipe.synchronize(), "
    "or given them other values, before {step}. Each rank trains a part of them, and what one rank alone "
    "changes is lost on the others: change them alike on all ranks, or call pipe.load_state_dict(state) on "
    "all.",
}
_VALUES = (
    "Rank {rank} has other values of {name} than rank {first}, before {step} began: code that ran on one of "
    "the ranks alone has changed them, or their optimizers differ. Change what several ranks hold on all of "
    "them, or call pipe.share_values() afterwards."
)
_BATCH = (
    "Rank {rank} has other values in {name} of the batch than rank {first} in {step}. Give all ranks the "
    "same batches in the same order: seed the sampler alike (a DataLoader that shuffles takes "
    "generator=torch.Generator().manual_seed(…)), and do not divide the data between the ranks of a "
    "pipeline, as a DistributedSampler does."
)

_ROWS = (
    "Rank {rank} has other values in {name} of the batch than rank {first} of the same replica in {step}. "
    "Give all ranks of a replica the same batches in the same order: a DistributedSampler takes "
    "num_replicas=pipe.replicas and rank=pipe.replica, and not the number of the process."
)


def _other(values: Sequence[int]) -> int:
    """The first rank with another value than rank 0; 0 if there is none."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), 0)


def _other_present(values: Sequence[int]) -> tuple[int, int]:
    """The first rank whose value differs from the first that there is, or 0, and the rank of that."""
    first = next((rank for rank, value in enumerate(values) if value != ABSENT), 0)
    return _other([value or values[first] for value in values]), first


def _slots(leaves: Sequence[str]) -> list[tuple[int, list[str]]]:
    """The place of each leaf among the words; leaves beyond their number share places."""
    slots: dict[int, list[str]] = {}
    for k, name in enumerate(leaves):
        slots.setdefault(LEAVES + k % (WORDS - LEAVES), []).append(name)
    return [*slots.items()]
