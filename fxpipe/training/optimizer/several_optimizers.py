"""Optimizers of several classes as one: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer


def optimizers_in(optimizer: Optimizer) -> Sequence[Optimizer]:
    """The optimizers, one for each class, that an optimizer consists of."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else [optimizer]


class SeveralOptimizers(Optimizer):
    """Optimizers that are stepped as one.  ``of_groups``: the optimizer that updates each group.  It has the
    same mapping of options as its group here, and all of them have one state."""

    def __init__(self, of_groups: Sequence[Optimizer]):
        """of_groups: each of them as often as it has groups, in their order."""
        self.of_groups = [*of_groups]
        self.optimizers = [*dict.fromkeys(of_groups)]
        states: dict[Any, object] = defaultdict(dict)
        for optimizer in self.optimizers:
            states |= optimizer.state  # as their constructors may make it, and torch's here sets an empty one
        super().__init__(self._groups(), {})
        self.state, self.param_groups = states, self._groups()

    def _groups(self) -> list[dict[str, object]]:
        """The groups that the optimizers have now."""
        left = {optimizer: iter(optimizer.param_groups) for optimizer in self.optimizers}
        return [next(left[optimizer]) for optimizer in self.of_groups]

    @property
    def state(self) -> Any:
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state
        for optimizer in self.optimizers:
            optimizer.state = state

    def step(self, closure: Callable[[], object] | None = None) -> Any:
        loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let each optimizer load its own groups and their state, as its class does it."""
        saved = state_dict["param_groups"]
        states: dict[Any, object] = defaultdict(dict)
        for optimizer in self.optimizers:
            groups = [entry for entry, of in zip(saved, self.of_groups, strict=True) if of is optimizer]
            numbers = [number for group in groups for number in group["params"]]
            state = {
                number: state_dict["state"][number] for number in numbers if number in state_dict["state"]
            }
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            states |= optimizer.state
        self.state, self.param_groups = states, self._groups()
