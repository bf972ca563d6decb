"""A torch optimizer of one rank's parameters that clips by the gradient norm of the whole model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from fxpipe.errors import RunError
from fxpipe.training.zeroed import mark_zeroed

MASTER = "master_weight"
"""The name of the master in the state of a parameter."""


class Ranks(Protocol):
    """The other ranks, for the norm of all gradients."""

    def all_reduce_(self, value: torch.Tensor, *, largest: bool = False) -> None: ...


@dataclass(eq=False)
class Counts:
    """How often an optimizer's ``step`` was called, and its ``zero_grad``."""

    updates: int = 0
    zeroed: int = 0


class PipelineOptimizer(Optimizer):
    """Wraps a torch optimizer of this rank's parameters; ``step`` first clips, if asked to, by the norm of
    the gradients of all ranks.

    A gradient of another dtype than what is updated (``grad_dtype`` of ``fxpipe.compile``) is cast for the
    time of the update.  With master weights the wrapped optimizer updates these, wider copies of parameters,
    and each parameter gets its copy's value.

    ``optimizer``: the wrapped one; both have the same ``param_groups`` and ``state``, so schedulers of the
    learning rate and hooks take this one.  ``last_norm``: the norm before clipping, 0-d, where the last step
    computed it.  ``skipped``: the number of steps that were skipped as gradients were not finite.
    ``counts``: of its calls.
    ``names``: what is updated, a parameter or its master -> the parameter's name, or that of its rows.
    ``masters``: master -> parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[Parameter, str],
        counted: Sequence[Parameter],
        ranks: Ranks | None,
        clip_grad_norm: float | None = None,
        norm_type: float = 2.0,
        skip_nonfinite: bool = False,
        masters: Mapping[Parameter, Parameter] | None = None,
    ):
        """counted: the parameters that this rank counts in the norm (one rank counts a tied parameter).

        Raises RunError for a norm that is no number above 0.
        """
        for name, norm in (("clip_grad_norm", clip_grad_norm), ("norm_type", norm_type)):
            absent = norm is None and name == "clip_grad_norm"
            if not absent and not (isinstance(norm, int | float) and norm > 0):
                raise RunError(f"{name} is {norm!r} and must be a number above 0.")
        self.optimizer = optimizer
        self.masters = dict(masters or {})
        self.names = dict(names)
        self.last_norm: torch.Tensor | None = None
        self.skipped, self.counts = 0, Counts()
        self._counted, self._ranks = counted, ranks
        self._clip, self._norm_type, self._skip = clip_grad_norm, float(norm_type), skip_nonfinite
        self._made = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._made = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip and update; return the result of ``closure``, which is called first, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.counts.updates += 1
        if self._clip is not None or self._skip:
            norm = self.last_norm = self.grad_norm()
            if self._skip and not math.isfinite(norm):
                self.skipped += 1
                return loss
            if self._clip is not None:
                clip_grads_with_norm_(self._parameters(), self._clip, norm)
        self._update()
        return loss

    @torch.no_grad()
    def _update(self) -> None:
        """Step the wrapped optimizer on gradients of the dtype of what it updates; then give the parameters
        the values of their masters."""
        accumulated = {}
        for updated, parameter in zip(self._updated(), self._parameters(), strict=True):
            grad = parameter.grad
            if grad is not None and (updated is not parameter or grad.dtype != updated.dtype):
                accumulated[updated] = grad
                set_grad(updated, grad.to(updated.dtype))
        try:
            self.optimizer.step()
        finally:
            for updated, grad in accumulated.items():
                if updated in self.masters:
                    updated.grad = None
                else:
                    set_grad(updated, grad)
        if self.masters:
            torch._foreach_copy_([*self.masters.values()], [*self.masters])

    def _updated(self) -> list[Parameter]:
        """What the wrapped optimizer updates."""
        return [updated for group in self.param_groups for updated in group["params"]]

    def _parameters(self) -> list[Parameter]:
        """The model's parameters, in the same order."""
        return [self.masters.get(updated, updated) for updated in self._updated()]

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients of the model, on every rank; 0-d, of dtype float64."""
        grads = [p.grad for p in self._counted if p.grad is not None]
        device = grads[0].device if grads else None
        own = get_total_norm(grads, self._norm_type).to(device, torch.float64)
        if self._ranks is None:
            return own
        if math.isinf(self._norm_type):
            self._ranks.all_reduce_(own, largest=True)
            return own
        total = own**self._norm_type
        self._ranks.all_reduce_(total)
        return total ** (1 / self._norm_type)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradients.  They keep their memory by default, which saves its allocation in each step."""
        self.counts.zeroed += 1
        parameters = self._parameters()
        grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
        if set_to_none:
            for parameter in parameters:
                parameter.grad = None
        elif grads:
            torch._foreach_zero_(grads)
            mark_zeroed(grads)

    def options(self) -> dict[str, str]:
        """All that an update depends on beside parameters, gradients and state, as texts by name."""
        own = {"clip_grad_norm": self._clip, "norm_type": self._norm_type, "skip_nonfinite": self._skip}
        found = {"class": type(self.optimizer).__name__} | {name: _as_text(x) for name, x in own.items()}
        for k, group in enumerate(self.param_groups):
            at = f"groups[{k}]." if len(self.param_groups) > 1 else ""
            found |= {f"{at}{name}": _as_text(x) for name, x in group.items() if name != "params"}
        return found

    def state_of(self, updated: Parameter) -> dict[str, Any]:
        """The wrapped optimizer's state of what it updates, with the master itself."""
        master = {MASTER: updated.detach()} if updated in self.masters else {}
        return {**self.state.get(updated, {}), **master}

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state of this rank's parameters, and their masters.  ``Checkpointer`` saves
        that of all ranks, by the model's names."""
        found = self.optimizer.state_dict()
        held = {k: updated for k, updated in enumerate(self._updated()) if updated in self.masters}
        return {**found, "state": {**found["state"], **{k: self.state_of(x) for k, x in held.items()}}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Masters that the state does not hold get the values of the parameters."""
        states = dict(state_dict["state"])
        masters = {k: state[MASTER] for k, state in states.items() if MASTER in state}
        for k in masters:
            own = {name: value for name, value in states.pop(k).items() if name != MASTER}
            states |= {k: own} if own else {}
        if masters and not self.masters:
            warnings.warn(
                "The state holds master weights, and this optimizer has none: training goes on with the "
                "parameters, which have fewer bits. Make it with master_weights=True to keep them.",
                stacklevel=2,
            )
        self.optimizer.load_state_dict({**state_dict, "state": states})
        for k, updated in enumerate(self._updated()):
            if updated in self.masters:
                updated.copy_(masters.get(k, self.masters[updated]))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the constructor: all ranks must have the same groups."""
        if self._made:
            raise RunError("Groups are given when the optimizer is made: pipe.optimizer(…, groups=[…]).")
        self.optimizer.param_groups.append(param_group)


def _as_text(value: Any) -> str:
    """An option as text that is the same on all ranks, whose last digits may differ."""
    match value:
        case torch.Tensor() if value.numel() == 1 and value.device.type == "cpu":
            return _as_text(value.item())
        case float():
            return f"{value:.9g}"
        case None | bool() | int() | str():
            return str(value)
        case list() | tuple():
            return f"({', '.join(map(_as_text, value))})"
    return type(value).__name__


def set_grad(parameter: Parameter, grad: torch.Tensor) -> None:
    """Set ``.grad``, of any dtype; torch wants that in ``.grad_dtype``, which no earlier ``.grad`` may differ
    from."""
    parameter.grad = None
    parameter.grad_dtype = grad.dtype
    parameter.grad = grad
