"""The names of the parameters in an optimizer's state: each rank has the state of its own parameters alone.

In torch's format a state numbers parameters: that of another rank, or of another cut, may fit by its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from fxpipe.errors import OptionError

NAMES = "param_names"  # as torch calls it, in a group of a state

Groups = Sequence[Mapping[str, Any]]


def with_names(
    groups: Groups, updated: Sequence[Sequence[Parameter]], names: Mapping[Parameter, str]
) -> list[dict[str, Any]]:
    """Groups of a state, each with the names of its parameters, which ``torch.load`` reads.

    updated: by group.
    """
    pairs = zip(groups, updated, strict=True)
    return [{**group, NAMES: [str(names[parameter]) for parameter in own]} for group, own in pairs]


def without_names(groups: Groups) -> list[dict[str, Any]]:
    """Groups of a state as torch's optimizer has them, whose groups ranks compare."""
    return [{name: value for name, value in group.items() if name != NAMES} for group in groups]


def check_parameters(
    state: Mapping[str, Any], updated: Sequence[Sequence[Parameter]], names: Mapping[Parameter, str]
) -> None:
    """Raise OptionError for the state of other parameters than those that this rank updates.

    A state without names may be one of torch's: its numbers and shapes are compared.
    """
    groups, own = state["param_groups"], [[names[parameter] for parameter in each] for each in updated]
    theirs = [group.get(NAMES) for group in groups]
    has_sizes = [len(group["params"]) for group in groups] == [*map(len, own)]
    if not has_sizes or any(given not in (None, mine) for given, mine in zip(theirs, own, strict=False)):
        has = _shown([name for given in theirs for name in given or ()]) or "groups of other sizes"
        raise OptionError(_ANOTHERS.format(has=has, own=_shown([name for mine in own for name in mine])))
    numbers = (number for group in groups for number in group["params"])
    for number, parameter in zip(numbers, (x for each in updated for x in each), strict=True):
        for entry, value in state["state"].get(number, {}).items():
            if not _may_be_of(value, parameter):
                has = f"{entry} of shape {tuple(value.shape)}"
                shape = f"{names[parameter]} of shape {tuple(parameter.shape)} in its place"
                raise OptionError(_ANOTHERS.format(has=has, own=shape))


_ANOTHERS = (
    "The optimizer's state is that of other parameters: it has {has}, and this rank updates {own}. The state "
    "of a pipeline's optimizer is that of its rank's parameters alone. Save and resume by "
    "fxpipe.Checkpointer(pipe, directory, optimizer=optimizer), which has that of all ranks by the model's "
    "names and fits any cut; or give each rank the state that this rank had."
)


def _shown(names: Sequence[str]) -> str:
    return ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])])


def _may_be_of(value: Any, parameter: Parameter) -> bool:
    """Whether an entry of a state may be one of this parameter: with as many dimensions it has its shape, or
    one number for all along some of them."""
    if not isinstance(value, torch.Tensor) or value.dim() != parameter.dim():
        return True
    return all(size in (1, own) for size, own in zip(value.shape, parameter.shape, strict=True))
