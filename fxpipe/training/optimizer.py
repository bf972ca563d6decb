"""An optimizer of this rank's parameters, which clips by the gradient norm of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


class PipelineOptimizer:
    """Wraps a torch optimizer; ``step`` first clips by the gradient norm over all ranks.

    norm: sums a number over the ranks.
    counted: the parameters that this rank counts in the norm (a tied parameter is counted by one rank).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        counted: Mapping[str, torch.nn.Parameter],
        sum_over_ranks: Callable[[float], float],
        clip_grad_norm: float | None,
    ):
        self.optimizer = optimizer
        self._counted = counted
        self._sum_over_ranks = sum_over_ranks
        self._clip = clip_grad_norm

    @torch.no_grad()
    def step(self) -> float | None:
        """Clip and update; return the gradient norm before clipping (None without clipping)."""
        norm = None
        if self._clip is not None:
            norm = self.grad_norm()
            factor = self._clip / (norm + 1e-6)
            if not factor >= 1.0:  # as in torch, a NaN norm makes all gradients NaN
                for group in self.optimizer.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad.mul_(factor)
        self.optimizer.step()
        return norm

    def grad_norm(self) -> float:
        """The 2-norm of all gradients of the model."""
        grads = [p.grad for p in self._counted.values() if p.grad is not None]
        mine = sum(float(g.double().square().sum()) for g in grads)
        norm: float = self._sum_over_ranks(mine) ** 0.5
        return norm

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
