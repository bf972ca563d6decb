"""The lengths of the microbatches of a step: those of a batch, or of a list of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeGuard, TypeVar

import torch

from fxpipe.errors import BatchError, number_of
from fxpipe.plan.field_types import value_at
from fxpipe.plan.step import BatchSpec, Boundaries, StepSpec, Table, refused
from fxpipe.plan.tensors import dtype_of
from fxpipe.runtime.batch.microbatches import (
    batch_leaves,
    check_batch,
    given_leaves,
    microbatches_of,
    rows_of_replicas,
)

_Result = TypeVar("_Result")

Lengths = dict[str, int]
"""Of a microbatch, by name."""


def parts_of(spec: StepSpec, batch: object) -> list[tuple[object, int]]:
    """The microbatches of a list of them, or the batch of all, each with the number of microbatches it has.

    Raises BatchError for a list where no dimension has a name.
    """
    if not are_listed(batch, spec):
        return [(batch, spec.microbatches)]
    if not spec.lengths:
        why = spec.one_length or "no dimension was named: give dimensions={'sequence': 512} to fxpipe.compile"
        raise BatchError(
            f"The batch is a list of microbatches, and the programs take one batch of all: {why.rstrip('.')}."
        )
    return [(microbatch, 1) for microbatch in batch]


def of_replicas(spec: StepSpec, batch: object, replicas: int) -> list[object]:
    """The batch of each replica: of a list with a list for each, of one with the microbatches of all, of
    which each takes as many, or of a batch of the rows of all.

    Raises BatchError for a list that is neither, and where rows are unlike the example's.
    """
    if not are_listed(batch, spec):
        whole = spec.with_microbatches(spec.microbatches * replicas)
        lengths = or_example(spec, lengths_of(whole, batch))[0]
        return rows_of_replicas(spec.batch_at(lengths), batch, spec.microbatches, replicas)
    lists = sum(are_listed(each, spec) for each in batch)
    if lists == len(batch) == replicas:
        return [*batch]
    number, rest = divmod(len(batch), replicas)
    if lists or rest:
        has = f"{number_of(lists, 'list')} of them" if lists else number_of(len(batch), "microbatch")
        raise BatchError(
            f"The list has {has}, for {number_of(replicas, 'replica')}: give a list of microbatches for "
            "each, [[…], […]], or one list of which each takes as many."
        )
    return [batch[k * number : (k + 1) * number] for k in range(replicas)]


def are_listed(batch: object, spec: StepSpec) -> TypeGuard[list[object] | tuple[object, ...]]:
    """Whether a batch is a list of microbatches, and none of arguments."""
    # Without names a tuple has arguments, whatever they are.
    if not isinstance(batch, list | tuple if spec.lengths else list):
        return False
    names = {leaf.name for leaf in spec.batch.leaves}
    if not batch:
        return bool(names)
    if any(isinstance(each, torch.Tensor) for each in batch):
        return False
    leaves = {name for name, _ in batch_leaves(batch)}
    return not leaves or not leaves <= names


def lengths_of(spec: StepSpec, batch: object) -> list[Lengths | None]:
    """The lengths of each microbatch; None of one whose leaves are not there.

    Raises BatchError, naming microbatch and length, where leaves disagree, and for a length that programs do
    not take.
    """
    lengths: list[Lengths | None] = []
    for m, (part, number) in enumerate(parts_of(spec, batch)):
        if not spec.lengths:
            lengths += [{}] * number
            continue
        where = "" if part is batch else f"Microbatch {m}"
        try:
            leaves = given_leaves(spec.batch, part)
        except BatchError as error:
            if where and are_listed(part, spec):
                raise BatchError(
                    "The batch is a list of lists, as of all replicas: give that of this one, "
                    "batch[pipe.replica]."
                ) from error
            raise BatchError(f"{where}: {error}" if where else str(error)) from error
        lengths += [_lengths_of(spec, leaves, where, number)] * number
    return lengths


def agreed_lengths(spec: StepSpec, ranks: Mapping[int, Sequence[Lengths | None]]) -> list[Lengths]:
    """The lengths of each microbatch, by what each rank knows of them: of none those of the example.

    Raises BatchError where ranks differ.
    """
    agreed: list[Lengths | None] = []
    # A rank without leaves has no say in how many there are, and one with an empty list has.
    ranks = {rank: of_all for rank, of_all in ranks.items() if any(of_all) or not of_all} or ranks
    numbers = {rank: len(of_all) for rank, of_all in ranks.items()}
    first, number = next(iter(numbers.items()))
    for rank, other in numbers.items():
        if other != number:
            raise BatchError(
                f"Rank {rank} has {number_of(other, 'microbatch')}, and rank {first} has {number}. Give all "
                "ranks the same batches in the same order."
            )
    for m in range(number):
        known = {rank: lengths for rank, of_all in ranks.items() if (lengths := of_all[m]) is not None}
        agreed.append(next(iter(known.values()), None))
        for rank, lengths in known.items():
            if lengths != agreed[m]:
                first = next(iter(known))
                raise BatchError(
                    f"Rank {rank} has {_text(lengths)} in microbatch {m}, and rank {first} has "
                    f"{_text(known[first])}. Give all ranks the same batches in the same order."
                )
    return or_example(spec, agreed)


def _text(lengths: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {length}" for name, length in lengths.items())


def or_example(spec: StepSpec, lengths: Sequence[Lengths | None]) -> list[Lengths]:
    """The lengths, those of the example in place of what is not known."""
    example = {each.name: each.example for each in spec.lengths}
    return [example if each is None else each for each in lengths]


def _lengths_of(
    spec: StepSpec, leaves: Mapping[str, object], listed: str, microbatches: int
) -> Lengths | None:
    """The lengths of each of so many microbatches with these leaves.  listed: which one of a list it is, as
    text; empty for a batch of all."""
    where = listed or "The batch"
    named = {each.example: each for each in spec.lengths if not each.leading}
    leading = next((each for each in spec.lengths if each.leading), None)
    lengths: Lengths = {}
    leaf_of: dict[str, str] = {}
    for leaf in spec.batch.leaves:
        value = leaves.get(leaf.name)
        shape = () if leaf.unread or leaf.shape is None else leaf.shape
        # What else a leaf may be, the check of the batch tells.
        sizes: tuple[int, ...] = ()
        if isinstance(value, torch.Tensor) and not value.is_nested and value.dim() == len(shape):
            sizes = value.shape
        if listed and leading is None and len(sizes) > 1 and sizes[0] != shape[0]:
            raise BatchError(
                f"{where} has {number_of(sizes[0], 'row')} in {leaf.name!r}, and programs take {shape[0]}. "
                "For microbatches of other numbers name the rows in dimensions= of fxpipe.compile, too."
            )
        actual_of = [(named.get(n), actual) for n, actual in zip(shape[1:], sizes[1:], strict=False)]
        if sizes and leading is not None:
            rows, rest = divmod(sizes[0], microbatches)
            # Rows that make no whole microbatches the check of the batch tells.
            actual_of.append((leading, leading.example if rest else rows))
        for each, actual in actual_of:
            if each is None:
                continue
            if lengths.setdefault(each.name, actual) != actual:
                first = f"{lengths[each.name]} in {leaf_of[each.name]!r}"
                raise BatchError(f"{where} has {each.name} {first} and {actual} in {leaf.name!r}.")
            leaf_of.setdefault(each.name, leaf.name)
    if not lengths.keys() >= {each.name for each in spec.lengths}:
        return None
    if (refusal := refused(spec.lengths, lengths)) is not None:
        name, text = refusal
        is_longer = any(each.name == name and each.example < lengths[name] for each in spec.lengths)
        why = f" Others would be another step: {spec.fewer}" if spec.fewer and not is_longer else ""
        raise BatchError(f"{where} has {name} {lengths[name]} in {leaf_of[name]!r}. {text}{why}")
    return {each.name: lengths[each.name] for each in spec.lengths}


def checked(
    spec: StepSpec, batch: object, lengths: Sequence[Mapping[str, int]], needed: Collection[str]
) -> None:
    """Raise BatchError, naming microbatch and leaf, if the batch is unlike the example at these lengths."""
    _of_each(spec, batch, lengths, partial(check_batch, needed=needed))


def check_values(spec: StepSpec, batch: object, lengths: Sequence[Mapping[str, int]]) -> None:
    """Raise BatchError, naming microbatch, lengths and leaf, for values on the CPU that are no rows of their
    table or no boundaries of documents, and for other numbers of the whole batch than the first microbatch
    has: no step waits for the queue of an accelerator."""
    for name in spec.totals if are_listed(batch, spec) else ():
        totals = [given_leaves(spec.batch, part).get(name) for part, _ in parts_of(spec, batch)]
        here = [x.item() for x in totals if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
        if len(here) == len(totals) and len({*here}) > 1:
            m = next(m for m, x in enumerate(here) if x != here[0])
            raise BatchError(
                f"Microbatch {m} has {here[m]} in {name!r}, and microbatch 0 has {here[0]}. The loss divides "
                "a sum by it, as by a number of the whole step: give all microbatches that, or let "
                "loss_fn return (sum, count) where each has its own."
            )
    read: list[Table | Boundaries] = [*spec.tables, *spec.boundaries]
    for m, (part, _) in enumerate(parts_of(spec, batch) if read else ()):
        leaves, number = given_leaves(spec.batch, part), len(lengths) if part is batch else 1
        for each in read:
            value = leaves.get(each.leaf)
            if not isinstance(value, torch.Tensor) or value.is_nested or value.dim() != len(each.margins):
                continue  # what the check of the batch tells
            if value.device.type != "cpu":
                continue
            for one in value.tensor_split(number) if value.dim() else [value]:
                margins = zip(each.margins, one.shape, strict=True)
                inside = one[tuple(slice(a, n - b) for (a, b), n in margins)]
                if isinstance(each, Table):
                    wrong = _no_row(each, inside)
                else:
                    wrong = _no_boundaries(each, inside, lengths[m])
                if wrong:
                    where = "The batch" if part is batch else f"Microbatch {m}"
                    of = f", of {_text(lengths[m])}," if lengths[m] else ""
                    raise BatchError(f"{where}{of} has {wrong}.")


def _no_boundaries(boundaries: Boundaries, value: torch.Tensor, lengths: Mapping[str, int]) -> str:
    """What of a leaf is no boundaries; empty if all is."""
    ends, tokens = value.reshape(-1).tolist(), int(value_at(boundaries.tokens, [*lengths.values()]))
    falls = [f"{a} before {b}" for a, b in pairwise(ends) if a > b]
    wrong = [end for end in ends[:1] if end] + falls + [end for end in ends[-1:] if end > tokens]
    if not wrong:
        return ""
    return (
        f"{wrong[0]} in {boundaries.leaf!r}: boundaries of packed samples begin with 0 and rise to at most "
        f"the number of tokens, {tokens}"
    )


def _no_row(table: Table, value: torch.Tensor) -> str:
    """A value of a leaf that is no row of its table; empty if all are."""
    if (wrong := _not_in(table, value)) is None:
        return ""
    return f"{wrong} in {table.leaf!r}, which is read as one of {number_of(table.rows, 'row')} or classes"


def _not_in(table: Table, value: torch.Tensor) -> int | None:
    read = value if table.ignored is None else value[value != table.ignored]
    least, most = (int(x) for x in read.aminmax()) if read.numel() else (0, 0)
    if most >= table.rows:
        return most
    return least if table.least is not None and least < table.least else None


def cut(
    spec: StepSpec,
    batch: object,
    lengths: Sequence[Mapping[str, int]],
    needed: Collection[str],
    device: torch.device | None,
) -> list[dict[str, torch.Tensor]]:
    """The leaves of each microbatch, on the device; see ``microbatches_of``."""
    of_each = _of_each(spec, batch, lengths, partial(microbatches_of, needed=needed, device=device))
    return [microbatch for microbatches in of_each for microbatch in microbatches]


def stand_in(spec: StepSpec, device: torch.device | None) -> dict[str, torch.Tensor]:
    """A microbatch like the example, of zeros."""
    return {
        leaf.name: torch.zeros(leaf.shape, dtype=dtype_of(leaf.dtype), device=device)
        for leaf in spec.batch.leaves
        if leaf.shape is not None and not leaf.unread
    }


def _of_each(
    spec: StepSpec,
    batch: object,
    lengths: Sequence[Mapping[str, int]],
    run: Callable[[BatchSpec, object, int], _Result],
) -> list[_Result]:
    """Run a function of the parts of a batch; its BatchErrors name the microbatch."""
    results: list[_Result] = []
    for m, (part, number) in enumerate(parts_of(spec, batch)):
        try:
            results.append(run(spec.batch_at(lengths[m]), part, number))
        except BatchError as error:
            text = f"Microbatch {m}: {error}"
            if part is batch:
                is_one = spec.one_length and "No other lengths are possible, though dimensions were named:"
                text = f"{error} {is_one} {spec.one_length}".rstrip()
            raise BatchError(text) from error
    return results


def all_leaves(spec: StepSpec, batch: object) -> dict[str, Any]:
    """The leaves of a batch that are there; of a list of microbatches those of all, one behind the other."""
    of_each = [given_leaves(spec.batch, part) for part, _ in parts_of(spec, batch)]
    if not are_listed(batch, spec):
        return of_each[0]
    values = {name: [leaves.get(name) for leaves in of_each] for name in spec.batch.tensors}
    return {
        name: torch.cat([x.reshape(-1) for x in each if isinstance(x, torch.Tensor)])
        for name, each in values.items()
        if each and all(isinstance(x, torch.Tensor) for x in each)
    }
