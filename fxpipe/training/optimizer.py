"""A torch optimizer of one rank's parameters that clips by the gradient norm of the whole model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from fxpipe.errors import RunError
from fxpipe.plan.rows import whole_name
from fxpipe.plan.tensors import gradient_dtype
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


def with_masters(held: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """By name what to update: a float32 copy of each parameter with fewer bits, and the others themselves."""
    found = {}
    for name, parameter in held.items():
        dtype = gradient_dtype(parameter.dtype, torch.float32)
        wide = dtype == parameter.dtype
        found[name] = parameter if wide else Parameter(parameter.detach().to(dtype))
    return found


def made(cls: Callable[..., Optimizer], parameters: Any, options: Mapping[str, Any]) -> Optimizer:
    """``cls(parameters, **options)``.  Raises RunError where that is no optimizer."""
    makes_none = not callable(cls) or (isinstance(cls, type) and not issubclass(cls, Optimizer))
    optimizer = None if makes_none else cls(parameters, **options)
    if not isinstance(optimizer, Optimizer):
        raise RunError(
            f"pipe.optimizer takes a class of torch optimizers, such as torch.optim.AdamW; {cls!r:.60} makes "
            "none."
        )
    return optimizer


def grouped(
    held: Mapping[str, Parameter], groups: Sequence[Mapping[str, Any]], model_names: Collection[str]
) -> list[dict[str, Any]]:
    """Param groups of a rank's parameters; every rank has the same groups, some of them empty.

    held: by name, or the name of rows.  groups: each with ``params``, a pattern as in a shell (``*.bias``) or
    several; a parameter belongs to the first group that has its name, and to the last, without options, if
    none has.  model_names: those of all ranks.
    Warns of a pattern that no name of the model matches, and raises RunError for a group of such patterns.
    """
    patterns = []
    for group in groups:
        given = group.get("params")
        several = [given] if isinstance(given, str) else list(given or ())
        if not several or not all(isinstance(pattern, str) for pattern in several):
            raise RunError(
                'A group is a mapping with "params", names or patterns like "*.bias", and options.'
            )
        unmatched = [p for p in several if not any(fnmatchcase(name, p) for name in model_names)]
        message = f"No parameter that is trained matches {' or '.join(map(repr, unmatched))}."
        if len(unmatched) == len(several):
            raise RunError(f"{message} Take a name of the model.")
        if unmatched:  # as where one list is for models with and without biases
            warnings.warn(message, stacklevel=3)
        patterns.append(several)
    made: list[dict[str, Any]] = [{**group, "params": []} for group in groups] + [{"params": []}]
    for name, parameter in held.items():
        known = whole_name(name)
        fits = (k for k, several in enumerate(patterns) if any(fnmatchcase(known, p) for p in several))
        made[next(fits, -1)]["params"].append(parameter)
    return made


def check_separable(
    cls: Callable[..., Optimizer], options: Mapping[str, Any], device: torch.device, tables: bool
) -> None:
    """Raise RunError for an optimizer whose update of a parameter depends on other parameters (L-BFGS), or,
    where ranks hold rows of tables, on other rows (Adafactor, Muon): ranks would compute another update.

    Found by trial: both updates of a small table, in one optimizer and by halves in two.
    tables: whether ranks hold rows.
    """
    name = getattr(cls, "__name__", str(cls))
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(8, 8, generator=generator)
    grads = [torch.randn(8, 8, generator=generator) for _ in range(3)]
    options = {**options, "lr": 0.1} if "lr" in options else options  # 0 would hide every difference

    def updated(*parts: list[slice]) -> torch.Tensor:
        """The table after its slices were updated; each list of slices by an optimizer of its own."""
        held = [[Parameter(start[s].to(device, copy=True)) for s in part] for part in parts]
        for parameters, part in zip(held, parts, strict=True):
            optimizer = made(cls, parameters, options)
            for grad in grads:
                for parameter, s in zip(parameters, part, strict=True):
                    parameter.grad = grad[s].to(device)
                optimizer.step(lambda: 0.0)
        return torch.cat([p.detach() for parameters in held for p in parameters])

    upper, lower = slice(0, 4), slice(4, 8)
    apart = updated([upper], [lower])
    if not torch.allclose(updated([upper, lower]), apart, rtol=1e-4):
        raise RunError(
            f"{name} updates a parameter by the values of others, which other ranks hold. Take an optimizer "
            "that updates each parameter by itself, such as AdamW."
        )
    if tables and not torch.allclose(updated([slice(0, 8)]), apart, rtol=1e-4):
        raise RunError(
            f"{name} updates a row of a table by the values of other rows, which other ranks hold with "
            "vocab_parallel. Compile without it, or take an optimizer that updates each element by itself, "
            "such as AdamW."
        )
