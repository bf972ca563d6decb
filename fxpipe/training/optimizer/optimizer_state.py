"""The names of the parameters in an optimizer's state: each rank has the state of its own parameters alone.

In torch's format a state numbers parameters: that of another rank, or of another cut, may fit by its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from fxpipe.errors import OptionError

NAMES = "param_names"  # as torch calls it, in a group of a state
MASTER = "master_weight"
"""The name of the master in the state of a parameter."""


def named_state(
    optimizer: Optimizer,
    masters: Mapping[int, object],
    updated: Sequence[Sequence[Parameter]],
    names: Mapping[Parameter, str],
) -> dict[str, object]:
    """The state of an optimizer with the names of its parameters, which ``torch.load`` reads.

    masters: the state, by number, of parameters that have one.  updated: by group.
    """
    state = optimizer.state_dict()
    pairs = zip(state["param_groups"], updated, strict=True)
    groups = [{**group, NAMES: [str(names[parameter]) for parameter in part]} for group, part in pairs]
    return {**state, "state": {**state["state"], **masters}, "param_groups": groups}


def without_masters(state: Mapping[str, Any]) -> tuple[dict[str, object], dict[int, torch.Tensor]]:
    """A state as torch's optimizer has it, without names, by which ranks' groups would differ; and the
    masters in it, by number."""
    states = dict(state["state"])
    masters = {k: entries[MASTER] for k, entries in states.items() if MASTER in entries}
    for k in masters:
        rest = {name: value for name, value in states.pop(k).items() if name != MASTER}
        states |= {k: rest} if rest else {}
    groups = [{key: x for key, x in group.items() if key != NAMES} for group in state["param_groups"]]
    return {**state, "state": states, "param_groups": groups}, masters


def check_parameters(
    state: Mapping[str, Any], updated: Sequence[Sequence[Parameter]], names: Mapping[Parameter, str]
) -> None:
    """Raise OptionError for what is no state, or that of other parameters than those that this rank updates.

    A state without names may be one of torch's: its numbers and shapes are compared.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise OptionError(f"The optimizer's state is what its state_dict() gives; this is {state!r:.60}.")
    groups, ours = state["param_groups"], [[names[parameter] for parameter in each] for each in updated]
    theirs = [group.get(NAMES) for group in groups]
    has_sizes = [len(group["params"]) for group in groups] == [*map(len, ours)]
    pairs = zip(theirs, ours, strict=False)
    if not has_sizes or any(saved not in (None, wanted) for saved, wanted in pairs):
        has = _shown([name for saved in theirs for name in saved or ()]) or "groups of other sizes"
        raise OptionError(_ANOTHERS.format(has=has, own=_shown([name for wanted in ours for name in wanted])))
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
    return all(size in (1, length) for size, length in zip(value.shape, parameter.shape, strict=True))
