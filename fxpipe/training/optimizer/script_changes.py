"""What the script changes between a step and the update by its gradients.

A rank has the gradients of its part of the model, so what a script computes of "all" gradients is of a part:
the norm by which ``torch.nn.utils.clip_grad_norm_`` multiplies them, or by which SAM moves parameters.  Each
rank tells the others what was changed: one factor that all have is right, if its cause is known.  Where ranks
average gradients, as data parallel training does, all have a factor that plain torch has not.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.plan.rows import ShardName
from fxpipe.plan.tensors import dtype_of
from fxpipe.runtime.program.accelerator import event, is_accelerator
from fxpipe.runtime.torch_private import before_each_update, collectives_begun, writes_to
from fxpipe.training.model.elsewhere import is_elsewhere
from fxpipe.training.model.model_state import ModelState, Read
from fxpipe.training.optimizer.lost_steps import LOST, LostSteps
from fxpipe.training.optimizer.optimizer_trial import check_users_optimizer
from fxpipe.training.optimizer.weight_writes import (
    NOTHING,
    TENSORS,
    Elements,
    WeightWrites,
    Written,
    elements_of,
    explained,
)

#: The rounding errors that a product of a gradient may have, and those of two ranks' factors.
ROUNDINGS = 4


class Kind(IntEnum):
    """The kind of change that a rank has made.  ``ABSENT``: there is nothing by which it could tell.
    ``WRITTEN``: gradients were written to without an effect that shows, as where they are multiplied by 1.
    ``FACTOR``: they are multiplied by a number that steps or a norm explain; ``OTHER_FACTOR``: by another
    one."""

    ABSENT, NOTHING, FACTOR, OTHER_FACTOR, WRITTEN, GRADIENTS, PARAMETERS = range(7)


class Change(NamedTuple):
    """The change of one rank.  ``factor``: by which all gradients were multiplied, if that is all."""

    kind: Kind = Kind.ABSENT
    factor: float = 1.0


UNKNOWN = Change()

_left_by = WeakTensorKeyDictionary()  # gradient -> who compares that of the last step, as a reference


@dataclass(frozen=True, eq=False)
class _AfterStep:
    """A gradient as a step has left it.  ``elements``: some of it and of its parameter, if compared."""

    tensor: int
    version: int
    elements: tuple[torch.Tensor, torch.Tensor] | None

    def writes(self, grad: torch.Tensor) -> int:
        """How often it was written to since, or replaced."""
        return writes_to(grad) - self.version if id(grad) == self.tensor else 1 + writes_to(grad)


@dataclass(frozen=True, eq=False)
class _Comparison:
    """Elements of gradients and parameters after a step and before the update, in two rows each.

    ``written``: how often each gradient was written to, or replaced; empty if all are None.  ``steps``: whose
    gradients are there.  ``norm_is_known``: whether the script has the norm of all gradients, so that any
    factor, 1 too, may be by it.  ``has_communicated``: whether the script has, since the step.
    ``resolution``: the error that a product may have.  ``copied``: when the elements are on the CPU.
    ``if_undivided``: what to warn of where the script has not changed the gradients.  ``reads``: of gradients
    that other ranks have, before it.  ``lengths``: of the elements of each gradient.  ``is_update``: else it
    is before another step.  ``is_whole``: whether no update has used any of it before.  ``means``: the
    numbers of steps over which the script has taken means.
    """

    gradients: torch.Tensor
    parameters: torch.Tensor
    written: tuple[int, ...]
    steps: int
    norm_is_known: bool
    has_communicated: bool
    resolution: float
    copied: torch.Event | None
    if_undivided: str = ""
    reads: Sequence[Read] = ()
    lengths: Sequence[int] = ()
    is_update: bool = False
    is_whole: bool = False
    means: set[int] = field(default_factory=set)

    def is_zeroed(self) -> bool:
        """Whether what the step has left is gone, or zero, and nobody has asked for its norm; known behind
        ``change``."""
        before, after = self.gradients
        is_gone = not self.written or bool(before.any() and not after.any())
        return self.is_whole and is_gone and not self.norm_is_known

    def change(self) -> Change:
        if self.copied is not None:
            self.copied.synchronize()
        if not self.written:
            return UNKNOWN
        if not torch.equal(*self.parameters.nan_to_num()):
            return Change(Kind.PARAMETERS)
        before, after = self.gradients[:, self.gradients.isfinite().all(0)].double()
        if not (before.any() or after.any()):
            return Change(Kind.ABSENT if any(self.written) else Kind.NOTHING)
        if torch.equal(before, after):
            # A script that divides by the number of steps does so by 1, too, and writes nothing else.
            is_mean = self.steps == 1 and bool(self.means) and max(self.written) == 1
            is_known = self.norm_is_known or is_mean or not any(self.written)
            return Change(Kind.NOTHING if is_known else Kind.WRITTEN)
        factor = float(before @ after / before.square().sum())
        limit = abs(factor) * self.resolution * before.abs() + torch.finfo(self.gradients.dtype).tiny
        is_product = math.isfinite(factor) and bool(((after - factor * before).abs() <= limit).all())
        in_all = all(self.written) or not any(self.written)  # p.grad.data is written to without a trace
        if not (is_product and in_all):
            return Change(Kind.GRADIENTS)
        if factor and not self.norm_is_known and max(self.written) > 1 and self.mean_over(factor):
            return Change(Kind.WRITTEN)  # beside the division, as torch's clip_grad_norm_ does
        return Change(Kind.FACTOR if self._explains(factor) else Kind.OTHER_FACTOR, factor)

    def explained(self) -> Written:
        """The number that explains what was written to gradients, if there is one."""
        before, after = (row.split([*self.lengths]) for row in self.gradients.double())
        pairs = zip(before, after, strict=True)
        elements = [Elements(b, a, stepped=b, gradient=torch.zeros_like(b)) for b, a in pairs]
        return explained(elements, self.resolution)._replace(to_gradients=True)

    def _explains(self, factor: float) -> bool:
        """Whether it is by the norm of all gradients, the mean over their steps, or 0, for a new sum."""
        if self.norm_is_known or not factor:
            return True
        if steps := self.mean_over(factor):
            self.means.add(steps)
            if self.has_communicated and steps == dist.get_world_size():
                warnings.warn(
                    f"The gradients were divided by {steps}, the number of the steps that have added to them "
                    "and that of the processes, behind a call of torch.distributed. If it was their average "
                    "over processes, leave that out: pipe.step leaves the gradients of the whole batch, of "
                    "all ranks and replicas. If it was the mean over steps, make that call behind "
                    "opt.step().",
                    stacklevel=2,
                )
        return bool(steps)

    def mean_over(self, factor: float) -> int:
        """The number of steps over which it is the mean: of those whose gradients are there or, where fewer
        add up at the end of an epoch, of those before; 0 if it is no mean."""
        counts = (self.steps, *self.means)
        return next((n for n in counts if abs(factor * n - 1) <= self.resolution), 0)


@dataclass(eq=False)
class ScriptChanges:
    """The changes that the script makes in this process.  ``allowed``: whether the user has said that they
    need no values of other ranks.  ``known``: the optimizers that call ``compare`` before they update.
    ``writes``: to weights, behind an update."""

    state: ModelState
    rank: int
    allowed: bool = False
    known: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    divisors: set[float] = field(default_factory=set)  # of the losses of the steps whose gradients are there
    _names: tuple[str, ...] = ()  # of the gradients, if other processes have others
    _turn: int = 0
    _steps: int = 0  # whose gradients are there
    _most: int = 0  # whose gradients an update had
    _begins: bool = False  # whether the next step begins a new sum
    _knows_norm: bool = False  # of all gradients, as the last step has left them
    _collectives: int = 0  # of the script's, before the last step was over
    _left: int = 0  # gradients that the last step has left
    _means: set[int] = field(default_factory=set)
    _lost: LostSteps = field(default_factory=LostSteps)
    _has_warned: bool = False
    _has_told_of_sum: bool = False
    _after_step: dict[str, _AfterStep] = field(default_factory=dict)  # of what was not used for an update yet
    writes: WeightWrites = field(init=False)
    declared: Written = NOTHING  # what the script, which may do so, has written to gradients
    _begun: list[_Comparison] = field(default_factory=list)
    _earlier: list[_Comparison] = field(default_factory=list)

    def __post_init__(self) -> None:
        owned = [{*tensors.gradients} for tensors in self.state.owned]
        in_lanes = self.state.plan.lanes.shared
        is_divided = any(name.tensor in in_lanes for names in owned for name in names)
        if is_divided or len({frozenset(names) for names in owned if names}) > 1:
            self._names = self.state.owned_by(self.rank).gradients
            me = weakref.ref(self)
            before_each_update(lambda optimizer: _follow(me, optimizer))
        self.writes = WeightWrites(self._names, self.state.value, self.resolution)

    @cached_property
    def resolution(self) -> float:
        """The relative error that a factor may have; the same on all ranks."""
        plan = self.state.plan
        dtypes = {dtype_of(layout.dtype) for layout in plan.layouts.values()}
        trained = {plan.gradient_dtype(x) for x in dtypes if x.is_floating_point or x.is_complex}
        return ROUNDINGS * max((torch.finfo(dtype).eps for dtype in trained), default=0.0)

    def stepped(self, *, adds: bool = False) -> None:
        """Remember the gradients that a step has left.  adds: whether it has added to those of the last."""
        self._steps = self._steps + 1 if adds and not self._begins else 1
        if self._steps == 1:
            self.divisors.clear()
        self._knows_norm = self._begins = False
        self._collectives = collectives_begun()
        self._turn += 1
        parameters = {n: p for n in self._names if (p := self.state.parameter(n)).grad is not None}
        every = -(-len(parameters) // TENSORS)
        compared = [name for k, name in enumerate(parameters) if (k + self._turn) % every == 0]
        elements = _elements([parameters[name] for name in compared])
        known = dict(zip(compared, elements, strict=True))
        self._after_step = {
            name: _AfterStep(id(p.grad), writes_to(p.grad), known.get(name))
            for name, p in parameters.items()
            if p.grad is not None
        }
        self.writes.stepped(known)
        for name in self.state.owned_by(self.rank).gradients:
            if (grad := self.state.parameter(name).grad) is not None:
                _left_by[grad] = weakref.ref(self)
        self._left = len(self._after_step)

    def warn_of_unused(self) -> None:
        """Warn, before a step, of gradients to which it adds as the last one has left them, where an
        optimizer has used others of that: no optimizer has their parameters."""
        if self._has_warned or len(self._after_step) in (0, self._left):
            return
        grads = {name: self.state.parameter(name).grad for name in self._after_step}
        unused = [n for n, grad in grads.items() if grad is not None and not self._after_step[n].writes(grad)]
        if unused:
            self._has_warned = True
            warnings.warn(
                f"{self.state.plan.model} makes gradients of {unused[0]} that no optimizer has used, and "
                "they add up: one updates other parameters of the step alone. pipe.optimizer has what its "
                "pipeline trains: make one of this pipeline too, or torch's of model.parameters(); or call "
                "requires_grad_(False) before you compile.",
                stacklevel=2,
            )

    def compare(self, optimizer: Optimizer | None = None, *, gradients_alone: bool = False) -> None:
        """Begin to compare the gradients that are about to be used: by this optimizer, or all."""
        parameters = self._used(optimizer)
        after_step = {name: self._after_step.pop(name) for name in parameters}
        there = {name: p for name, p in parameters.items() if p.grad is not None}
        written = tuple(after_step[n].writes(p.grad) for n, p in there.items() if p.grad is not None)
        self._begins |= not gradients_alone or all(written)
        then = [x for name in there if (x := after_step[name].elements) is not None]
        now = _elements([p for name, p in there.items() if after_step[name].elements is not None])
        text = "" if gradients_alone else self._if_undivided()
        is_whole = not gradients_alone or len(parameters) == self._left
        if not now and (there or not parameters or not is_whole):
            return
        gradients, values = (
            torch.stack([torch.cat([x[k] for x in each]) for each in (then, now)])
            if now
            else torch.zeros((2, 0), device=self.state.device)
            for k in range(2)
        )
        if gradients_alone:
            values = values[:, :0]
        gradients, values = (x.to("cpu", non_blocking=True) for x in (gradients, values))
        copied = None
        if is_accelerator(self.state.device):
            copied = event(self.state.device)  # compared when it has passed, so no rank waits for its device
            copied.record()
        begun = _Comparison(
            gradients,
            values,
            written,
            steps=self._steps,
            norm_is_known=self._knows_norm,
            has_communicated=not self.allowed and collectives_begun() > self._collectives,
            resolution=self.resolution,
            copied=copied,
            if_undivided="" if self.allowed else text,
            reads=[*self.state.reads],
            lengths=[len(gradient) for gradient, _ in now],
            is_update=not gradients_alone,
            is_whole=is_whole,
            means=self._means,
        )
        self.state.reads.clear()
        self._begun.append(begun)

    def _if_undivided(self) -> str:
        """What to warn of where an update has the sum of the gradients of several steps; "" where that may be
        meant."""
        steps, most = self._steps, self._most
        self._most = max(most, steps)
        if steps > 1 and any(abs(steps / by - 1) < 1e-6 for by in self.divisors):
            return _LOSS_DIVIDED.format(steps=steps)
        return _LEFT_OUT.format(steps=steps, most=most) if 0 < most < steps else ""

    def norm_asked(self) -> None:
        """The script gets the norm of all gradients, which a step of another pipeline of the model may have
        left."""
        grads = [self.state.parameter(name).grad for name in self.state.owned_by(self.rank).gradients]
        last = [_left_by[grad]() for grad in grads if grad is not None and grad in _left_by]
        for changes in dict.fromkeys((self, *last)):
            if changes is not None:
                changes._norm_is_asked()

    def _norm_is_asked(self) -> None:
        """It is that of the step's gradients, unless the script has changed them."""
        then = {name: known.elements[0] for name, known in self._after_step.items() if known.elements}
        parameters = {name: p for name in then if (p := self.state.parameter(name)).grad is not None}
        now = [gradient for gradient, _ in _elements([*parameters.values()])]
        pairs = zip((then[name] for name in parameters), now, strict=True)
        is_there = bool(parameters) or not then
        self._knows_norm |= is_there and all(torch.equal(*torch.stack(pair).nan_to_num()) for pair in pairs)

    def _used(self, optimizer: Optimizer | None) -> dict[str, Parameter]:
        """The parameters of this optimizer, or all, whose gradients were not used since the step, nor left
        by a step of another pipeline of the model."""
        parameters = {name: self.state.parameter(name) for name in self._after_step}
        for name, parameter in [*parameters.items()]:
            last = None if parameter.grad is None else _left_by.get(parameter.grad)
            if last is not None and last() is not self:
                del parameters[name], self._after_step[name]
        if optimizer is None:
            return parameters
        used = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in parameters.items() if id(p) in used}

    def is_used_by(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer updates by gradients that a step has left."""
        return bool(self._used(optimizer))

    def check(self, optimizer: Optimizer) -> None:
        """Raise RunError for an optimizer of the user's own that has a part of what it updates here, and
        needs all of it."""
        updated = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        trained = [self.state.parameter(name) for name in self._names]
        if any(map(is_elsewhere, updated.values())) or {*map(id, trained)} <= updated.keys():
            dims = frozenset(dim for name in self._names for dim in self.state.spans_of(ShardName(name)))
            check_users_optimizer(optimizer, dims, self.state.device)

    def change(self, *, at_once: bool) -> Change:
        """The change before the updates since the last call; of all of them, if several were made.

        at_once: wait for an accelerator; else it is what there was at the call before.
        """
        if is_accelerator(self.state.device) and not at_once:
            comparisons, self._earlier, self._begun = self._earlier, self._begun, []
        else:
            comparisons, self._earlier, self._begun = self._earlier + self._begun, [], []
        changed = [(comparison, comparison.change()) for comparison in comparisons]
        for comparison, change in changed:
            zeroed = comparison.is_zeroed()
            if not comparison.is_update:
                self._lost.stepped(zeroed=zeroed)
            elif self._lost.updated(zeroed=zeroed) and not self.allowed:
                warnings.warn(LOST, stacklevel=2)
            is_unchanged = change.kind in (Kind.NOTHING, Kind.WRITTEN)
            if is_unchanged and comparison.if_undivided and not self._has_told_of_sum:
                self._has_told_of_sum = True
                warnings.warn(comparison.if_undivided, stacklevel=2)
            is_mean = comparison.mean_over(change.factor) > 1
            self.state.reads += comparison.reads if not is_mean else ()  # else of the loop that divides them
        for text, file, line in self.state.reads:
            warnings.warn_explicit(text, UserWarning, file, line)
        self.state.reads.clear()
        if self.allowed:
            declared = [comparison.explained() for comparison in comparisons]
            self.declared = declared[0] if len(declared) == 1 else NOTHING
            return UNKNOWN
        changes = {change for _, change in changed} - {UNKNOWN}
        kind = max((change.kind for change in changes), default=Kind.ABSENT)
        if kind in (Kind.FACTOR, Kind.OTHER_FACTOR) and len(changes) > 1:
            return Change(Kind.GRADIENTS)
        return Change(kind, max((c.factor for c in changes if c.kind is kind), default=1.0))


def _elements(parameters: Sequence[Parameter]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copies of some elements of each gradient, and of its parameter."""
    both = []
    for tensors in ([p.grad for p in parameters], [p.detach() for p in parameters]):
        both.append(elements_of([tensor for tensor in tensors if tensor is not None]))
    return [*zip(*both, strict=True)]


def _follow(changes: weakref.ref[ScriptChanges], optimizer: Optimizer) -> None:
    """Let an optimizer of the user's, which is about to update, compare from now on, behind its hooks."""
    living = changes()
    if living is not None and living.is_used_by(optimizer) and optimizer not in living.known:
        living.known.add(optimizer)
        living.check(optimizer)
        optimizer.register_step_pre_hook(lambda updating, *_: _compare(changes, updating))
        optimizer.register_step_post_hook(lambda *_: _updated(changes))


def _compare(changes: weakref.ref[ScriptChanges], optimizer: Optimizer) -> None:
    if (living := changes()) is not None:
        living.compare(optimizer)


def _updated(changes: weakref.ref[ScriptChanges]) -> None:
    if (living := changes()) is not None:
        living.writes.updated()


def different_changes(changes: Sequence[Change], resolution: float, step: str) -> str | None:
    """Tell in a message what the ranks' scripts have changed that they may not; None for one factor at most.

    changes: of all ranks.  resolution: of their factors.  step: the one that follows the update, as text.
    """
    between = f"between pipe.step and the update before {step}"
    kinds = [change.kind for change in changes]
    for kind, text in _REFUSED.items():
        if kind in kinds:
            return f"Rank {kinds.index(kind)} has {text.format(between=between)} {_REMEDY}"
    factors = {rank: change.factor for rank, change in enumerate(changes) if change.kind is not Kind.ABSENT}
    first = next(iter(factors), 0)
    for rank, factor in factors.items():
        if abs(factor - factors[first]) > resolution * abs(factors[first]):
            return (
                f"Rank {rank} has multiplied its gradients by {factor:.6g} {between}, and rank {first} by "
                f"{factors[first]:.6g}. {_REMEDY}"
            )
    if Kind.OTHER_FACTOR in kinds:
        rank = kinds.index(Kind.OTHER_FACTOR)
        return (
            f"Rank {rank} has multiplied its gradients by {factors[rank]:.6g} {between}, as all ranks have. "
            f"{_FACTOR_REMEDY}"
        )
    return None


_LOSS_DIVIDED = (
    "The script divides the losses of {steps} steps by their number, and not the gradients, which add up: "
    "the backward has run in pipe.step. Divide each p.grad before the update, or give one step all of these "
    "rows, with more microbatches= in fxpipe.compile."
)
_LEFT_OUT = (
    "An update has the gradients of {steps} steps, where earlier ones had those of {most} at most. Where a "
    "script leaves out a batch by its loss, pipe.step has added its gradients: call zero_grad() there. If "
    "their sum is meant, pipe.optimizer(…, changes_gradients=True) says so."
)
_REFUSED = {
    Kind.PARAMETERS: "changed parameters {between}, as SAM does.",
    Kind.GRADIENTS: "changed gradients {between}, and not all of them by one factor.",
    Kind.WRITTEN: (
        "written to gradients {between}, as torch's clip_grad_norm_ does even if it changes none, and a "
        "division by 1."
    ),
}
_REMEDY = (
    "A rank has the gradients of its part of the model, and their norm is not the model's: clip with "
    "pipe.optimizer(…, clip_grad_norm=…), and ask for the norm with opt.grad_norm(). What needs no values of "
    "other ranks, such as masks, noise and clip_grad_value_, is allowed with "
    "pipe.optimizer(…, changes_gradients=True)."
)
_FACTOR_REMEDY = (
    "pipe.step leaves the gradients of the whole batch, of all ranks and replicas: leave out their average "
    "over processes, as data parallel training takes it, and a GradScaler. The mean over the steps whose "
    "gradients add up is known, and so is what follows opt.grad_norm(). Any other factor, as the inverse "
    "of a constant in the loss, is allowed with pipe.optimizer(…, changes_gradients=True)."
)
