"""Says for which of two sets of programs the batch of a step is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from enum import IntEnum

import torch

from fxpipe.errors import BatchError
from fxpipe.plan.branches import Branch, When
from fxpipe.plan.step import StepSpec
from fxpipe.runtime.batch.lengths import are_listed
from fxpipe.runtime.batch.microbatches import batch_leaves


class Says(IntEnum):
    """What the batch of one rank says: nothing, where it lacks the leaves or will be refused; that the first
    programs are for it, or the others; or that some of its microbatches are for each."""

    NOTHING, FIRST, OTHERS, BOTH = range(4)


def says(when: When, spec: StepSpec, batch: object, microbatches: int) -> Says:
    """Ask the leaves of a batch of so many microbatches.  when: which ones the other programs are for."""
    if when.branch is not None:
        answers = _answers(when.branch, spec, batch, microbatches)
        if not answers:
            return Says.NOTHING
        alike = {answer == when.branch.answer for answer in answers}
        return Says.BOTH if len(alike) > 1 else Says.OTHERS if True in alike else Says.FIRST
    each = [_is_as_assumed(when.assumed, leaves) for leaves in _leaves(spec, batch)]
    return Says.NOTHING if None in each or not each else Says.OTHERS if all(each) else Says.FIRST


def are_others(when: When, said: Collection[int]) -> bool:
    """Whether the other programs run the step, of what all ranks said.

    Raises BatchError for microbatches with different answers: a step runs one set of programs.
    """
    said = {*said} - {Says.NOTHING}
    branch = when.branch
    if branch is not None and (Says.BOTH in said or len(said) > 1):
        raise BatchError(
            f"The model's code asks the leaf {branch.leaf!r} at {branch.where}, and the microbatches of this "
            "step give both answers. A step runs the programs of one: give it microbatches that agree, or "
            "take the branch out of the model (torch.where)."
        )
    return said == {Says.OTHERS}


def _leaves(spec: StepSpec, batch: object) -> Iterator[Mapping[str, object]]:
    """The leaves of the batch, or of each microbatch of a list; none of what the step will refuse."""
    for each in batch if are_listed(batch, spec) else [batch]:
        try:
            yield dict(batch_leaves(each))
        except BatchError:
            yield {}


def _is_as_assumed(assumed: Mapping[str, float], leaves: Mapping[str, object]) -> bool | None:
    """Whether all elements of leaves are the numbers that programs assume; None without the leaves."""
    tensors = {name: x for name in assumed if (x := _values(leaves.get(name))) is not None}
    if len(tensors) < len(assumed):
        return None
    return all(bool((x == assumed[name]).all()) for name, x in tensors.items())


def _answers(branch: Branch, spec: StepSpec, batch: object, microbatches: int) -> list[bool]:
    """The answer of each microbatch; none where the step will refuse the leaf, or where it is not there."""
    listed, answers = are_listed(batch, spec), list[torch.Tensor]()
    shape = next(leaf.shape or () for leaf in spec.batch.leaves if leaf.name == branch.leaf)
    for leaves in _leaves(spec, batch):
        x = _values(leaves.get(branch.leaf))
        parts = 1 if listed or x is None or not x.dim() else microbatches
        if x is None or x.dim() != len(shape) or (x.dim() and x.shape[0] % parts):
            return []
        if not spec.lengths and tuple(x.shape[1:]) != tuple(shape[1:]):
            return []
        answers += map(branch.of, x.tensor_split(parts) if x.dim() else [x])
    return torch.cat(answers).tolist() if answers else []


def _values(leaf: object) -> torch.Tensor | None:
    return leaf if isinstance(leaf, torch.Tensor) and not leaf.is_meta and leaf.numel() else None
