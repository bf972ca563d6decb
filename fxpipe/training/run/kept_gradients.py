"""The memory of a rank's gradients, to which a captured step writes: each step gets the same again.

A step whose gradients were set to None takes new memory for them, and what the script has kept of the last
step stays as it is.  So memory is given again where the script holds nothing of it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch

from fxpipe.plan.rows import ShardName
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.torch_private import holders_of_memory
from fxpipe.training.model.model_state import ModelState


@dataclass(eq=False)
class KeptGradients:
    """The gradients of one rank.  ``_holders``: of memory that a step has taken anew, how many objects and
    tensors hold it where the script does not."""

    state: ModelState
    _tensors: dict[ShardName, torch.Tensor] = field(default_factory=dict)
    _holders: dict[ShardName, tuple[int, int]] = field(default_factory=dict)
    _begins: frozenset[ShardName] = frozenset()

    def lend(self, rank: int) -> dict[ShardName, torch.Tensor]:
        """The memory that the next step may write to; its runtime has no gradients yet."""
        names = self.state.plan.tensors[rank].gradients
        self._begins = frozenset(name for name in names if self.state.parameter(name).grad is None)
        free = [name for name in self._tensors if name in self._begins and self._is_free(name)]
        return {name: self._tensors[name] for name in free}

    def keep(self, rt: Runtime) -> None:
        """Keep the accumulators of the step that has ended."""
        names = self.state.plan.tensors[rt.rank].gradients
        others = {name for name in names if rt.grads[name] is not self._tensors.get(name)}
        self._tensors, rt.grads = {name: rt.grads[name] for name in names}, {}
        for name in self._tensors:
            parameter = self.state.parameter(name)
            if name in self._begins and parameter.grad is self._tensors[name]:
                parameter.grad = None  # as it will be when the memory is lent
                self._holders[name] = self._held_by(name)
                parameter.grad = self._tensors[name]
            elif name in others:
                self._holders.pop(name, None)  # the script's own tensor, which it may hold
        rt.grads = {name: self._tensors[name] for name in names}

    def _is_free(self, name: ShardName) -> bool:
        known, now = self._holders.get(name), self._held_by(name)
        return known is not None and now[0] <= known[0] and now[1] <= known[1]

    def _held_by(self, name: ShardName) -> tuple[int, int]:
        tensor = self._tensors[name]
        return sys.getrefcount(tensor), holders_of_memory(tensor.untyped_storage())
