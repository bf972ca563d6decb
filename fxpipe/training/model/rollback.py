"""Takes an update of an optimizer back, to the bit: from copies, whatever the optimizer computes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from fxpipe.runtime.torch_private import copy_each


@dataclass(frozen=True, eq=False)
class Rollback:
    """The optimizer before an update: the values of what it updates, its state of each, its groups'
    options."""

    values: tuple[torch.Tensor, ...]
    state: Mapping[Parameter, dict[str, object]]
    options: tuple[dict[str, object], ...]

    @staticmethod
    @torch.no_grad()
    def of(optimizer: Optimizer, earlier: Rollback | None = None) -> Rollback:
        """Copy what an update will change.  earlier: one that is needed no more, whose memory the copies
        take: new memory costs as much time as the copies themselves."""
        updated = _updated(optimizer)
        values = tuple(map(torch.empty_like, updated)) if earlier is None else earlier.values
        if updated:
            copy_each([*values], [p.detach() for p in updated])
        known = {} if earlier is None else earlier.state
        state = {
            p: {key: _copied(known.get(p, {}).get(key), x) for key, x in optimizer.state[p].items()}
            for p in updated
            if p in optimizer.state
        }
        options = tuple(copy.deepcopy(_options(group)) for group in optimizer.param_groups)
        return Rollback(values, state, options)

    @torch.no_grad()
    def take_back(self, optimizer: Optimizer) -> None:
        """Give the optimizer what it had, in the memory that it has now where that fits."""
        updated = _updated(optimizer)
        if updated:
            copy_each([*updated], [*self.values])
        for parameter in updated:
            if parameter not in self.state:
                optimizer.state.pop(parameter, None)
                continue
            now, before = optimizer.state[parameter], self.state[parameter]
            optimizer.state[parameter] = {key: _copied(now.get(key), x) for key, x in before.items()}

    @contextmanager
    def options_of_then(self, optimizer: Optimizer) -> Iterator[None]:
        """Give the groups the options that they had, for a block: a scheduler may have come since."""
        now = [_options(group) for group in optimizer.param_groups]
        for group, then in zip(optimizer.param_groups, self.options, strict=True):
            group |= then
        try:
            yield
        finally:
            for group, options in zip(optimizer.param_groups, now, strict=True):
                group |= options


def _updated(optimizer: Optimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _options(group: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in group.items() if name != "params"}


def _copied(memory: Any, value: Any) -> object:
    """A copy of a value: of a tensor in this memory, if it fits."""
    tensors = isinstance(memory, torch.Tensor) and isinstance(value, torch.Tensor)
    fits = tensors and (memory.shape, memory.dtype, memory.device) == (value.shape, value.dtype, value.device)
    return memory.copy_(value) if fits else copy.deepcopy(value)
