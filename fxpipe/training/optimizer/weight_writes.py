"""What the script writes to weights between an update and the next step, by one number of a rank.

A norm, a quantile or a bound of the weights in ``pipe.parameters``, or in an optimizer's groups, is that of a
rank's part of the model.  It shows where one number explains what was written to several tensors, and ranks
have other ones: a factor, one of gradients that no optimizer has used, a bound for magnitudes, one below
which they become zero, or one that is taken off.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from itertools import product
from typing import NamedTuple

import torch

from fxpipe.runtime.program.accelerator import event, is_accelerator

#: Tensors of which elements are compared, others after each update, and how many elements of each.
TENSORS, ELEMENTS = 16, 64


class Form(IntEnum):
    """How a number explains what was written to tensors.  ``SCALED``: a factor of all that are compared;
    ``STEP``: one of their gradients, which was added."""

    NONE, UNCHANGED, FACTOR, SCALED, STEP, BOUND, THRESHOLD, SHRUNK = range(8)


class Written(NamedTuple):
    """What one rank has written to its weights, or its gradients: the number lies between ``least`` and
    ``most``."""

    form: Form = Form.NONE
    least: float = 0.0
    most: float = 0.0
    to_gradients: bool = False


NOTHING = Written()
UNCHANGED = Written(Form.UNCHANGED, 1.0, 1.0)


class Elements(NamedTuple):
    """Elements of a tensor before and behind a change.  ``stepped``: before the update, zeros if they are not
    known.  ``gradient``: as the step has left it, where no optimizer has used it."""

    before: torch.Tensor
    after: torch.Tensor
    stepped: torch.Tensor
    gradient: torch.Tensor


class WeightWrites:
    """Compares some elements of the weights of a process, as an update has left them and before a step."""

    def __init__(self, names: Sequence[str], value: Callable[[str], torch.Tensor], resolution: float):
        """names: of the weights.  value: gives that of one.  resolution: the relative error of a number."""
        self._names, self._value, self._resolution = names, value, resolution
        self._turn = 0
        self._then: Mapping[str, torch.Tensor] = {}  # elements behind the last update, or step
        self._gradients: Mapping[str, torch.Tensor] = {}  # and of gradients that no optimizer has used
        self._stepped: Mapping[str, torch.Tensor] = {}  # elements behind the last step
        self._compared: _Compared | None = None
        self._has_told = False

    def updated(self) -> None:
        """An optimizer has updated the weights."""
        self._turn += 1
        every = -(-len(self._names) // TENSORS)
        chosen = [name for k, name in enumerate(self._names) if (k + self._turn) % every == 0]
        self._then, self._gradients = dict(zip(chosen, self._elements(chosen), strict=True)), {}

    def stepped(self, elements: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """A step has left these elements of gradients and weights, by name."""
        self._gradients = {name: gradient for name, (gradient, _) in elements.items()}
        self._then = self._stepped = {name: weight for name, (_, weight) in elements.items()}

    def compare(self) -> Written:
        """What was written before the step that begins; on an accelerator before the step before it."""
        if self._has_told or not self._names:
            return NOTHING
        before, self._compared = self._compared, None
        if self._then:
            now = dict(zip(self._then, self._elements([*self._then]), strict=True))
            first = next(iter(now.values()))
            if not is_accelerator(first.device) and all(map(torch.equal, self._then.values(), now.values())):
                return UNCHANGED
            compared = _Compared.begun(self._then, now, self._stepped, self._gradients)
            if compared.copied is None:
                before = compared
            else:
                self._compared = compared
        return NOTHING if before is None else self._written(before)

    def _elements(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        return elements_of([self._value(name) for name in names])

    def _written(self, compared: _Compared) -> Written:
        return explained(compared.elements(), self._resolution)

    def tell(self, each: Sequence[Written], step: str, *, warns: bool) -> None:
        """Warn once where numbers explain what ranks have written, and differ.  All ranks call it.

        each: of all ranks.  step: the one that follows, as text.  warns: whether this process does.
        """
        if not self._has_told and (text := different_writes(each, step)):
            self._has_told = True  # nothing is compared from now on
            if warns:
                warnings.warn(text, stacklevel=2)


class _Compared(NamedTuple):
    """The fields of ``Elements`` of several tensors, in a row each; ``lengths``: of the tensors;
    ``copied``: when they are on the CPU."""

    lengths: Sequence[int]
    fields: Sequence[torch.Tensor]
    copied: torch.Event | None

    @staticmethod
    def begun(then: Mapping[str, torch.Tensor], *others: Mapping[str, torch.Tensor]) -> _Compared:
        """Begin to copy elements, by name; zeros where others lack some."""
        rows = [[each.get(name, torch.zeros_like(x)) for name, x in then.items()] for each in (then, *others)]
        fields = [torch.cat(row) for row in rows]
        copied = event(fields[0].device) if is_accelerator(fields[0].device) else None
        fields = [x.to("cpu", non_blocking=True) for x in fields]
        if copied is not None:
            copied.record()
        return _Compared([len(x) for x in then.values()], fields, copied)

    def elements(self) -> Sequence[Elements]:
        if self.copied is not None:
            self.copied.synchronize()
        rows = [field.double().split([*self.lengths]) for field in self.fields]
        return [Elements(*each) for each in zip(*rows, strict=True)]


def elements_of(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Copies of some elements of each tensor."""
    views = [_view(tensor.detach()) for tensor in tensors]
    return torch.cat(views).split([len(view) for view in views]) if views else ()


def _view(tensor: torch.Tensor) -> torch.Tensor:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    every = max(1, len(flat) // ELEMENTS)
    return flat[every // 2 :: every][:ELEMENTS]


def explained(tensors: Sequence[Elements], resolution: float) -> Written:
    """The number that explains what was written to these tensors; none of a single one, which may be its
    own.  Elements are in float64."""
    changed = [x for x in tensors if not torch.equal(x.before, x.after)]
    if not changed:
        return UNCHANGED
    for form, interval in _INTERVALS.items() if len(changed) > 1 else ():
        both = [interval(tensor, resolution) for tensor in changed]
        least, most = max(low for low, _ in both), min(high for _, high in both)
        if least <= most:
            is_of_all = len(changed) == sum(bool(x.before.any()) for x in tensors)
            return Written(Form.SCALED if form is Form.FACTOR and is_of_all else form, least, most)
    return NOTHING


_NEVER = math.inf, -math.inf


def _factor(x: Elements, resolution: float) -> tuple[float, float]:
    """The factors by which it may have been multiplied."""
    return _multiple(x.before, x.after, resolution * x.before.abs(), resolution)


def _step(x: Elements, resolution: float) -> tuple[float, float]:
    """The factors of its gradient that may have been added."""
    errors = resolution * x.before.abs()
    return _multiple(x.gradient, x.after - x.before, errors, resolution)


def _multiple(
    of: torch.Tensor, result: torch.Tensor, errors: torch.Tensor, resolution: float
) -> tuple[float, float]:
    """The factors by which ``of`` is the result, which has errors, and those of a product."""
    square = float(of.square().sum())
    factor = float(of @ result) / square if square else math.nan
    errors = errors + resolution * (factor * of).abs()
    if not (0 < abs(factor) < math.inf and bool(((result - factor * of).abs() <= errors).all())):
        return _NEVER
    error = float(errors @ of.abs()) / square
    return factor - error, factor + error


def _bound(x: Elements, resolution: float) -> tuple[float, float]:
    """The bounds to which magnitudes may have been clamped."""
    bound = float(x.after.abs().amax())
    limited = x.before.clamp(-bound, bound)
    is_bounded = bound and bool(((x.after - limited).abs() <= bound * resolution).all())
    return (bound * (1 - resolution), bound * (1 + resolution)) if is_bounded else _NEVER


def _threshold(x: Elements, resolution: float) -> tuple[float, float]:
    """The numbers below which magnitudes may have become zero, but for those that were zero before."""
    kept = x.after != 0
    new = x.before[~kept & (x.before != 0) & (x.stepped != 0)].abs()
    if not torch.equal(x.after[kept], x.before[kept]) or not len(new):
        return _NEVER
    return float(new.amax()), float(x.before[kept].abs().amin()) if kept.any() else math.inf


def _shrunk(x: Elements, resolution: float) -> tuple[float, float]:
    """The numbers that may have been taken off magnitudes, down to zero."""
    kept = x.after != 0
    if not kept.any():
        return _NEVER
    errors = resolution * x.before.abs()
    off = x.before.abs() - x.after.abs()
    least, most = float((off - errors)[kept].amax()), float((off + errors)[kept].amin())
    is_shrunk = least > 0 and bool((x.after * x.before >= 0).all()) and bool((off <= most + errors).all())
    return (least, most) if is_shrunk else _NEVER


_INTERVALS = {
    Form.FACTOR: _factor,
    Form.STEP: _step,
    Form.BOUND: _bound,
    Form.THRESHOLD: _threshold,
    Form.SHRUNK: _shrunk,
}


def different_writes(each: Sequence[Written], step: str) -> str | None:
    """Tell in a message where two ranks have explained what they wrote alike, by numbers that differ."""
    for (forms, text), what in product(_COMPARED.items(), ("weights", "gradients")):
        of = [(written.form, "gradients" if written.to_gradients else "weights") for written in each]
        alike = [rank for rank, (form, its) in enumerate(of) if form in forms and its == what]
        high = max(alike, key=lambda rank: each[rank].least, default=0)
        low = min(alike, key=lambda rank: each[rank].most, default=0)
        if each[high].least > each[low].most:
            (first, there), (rank, here) = (
                (k, text.format(what, _number(each[k]))) for k in sorted((low, high))
            )
            return f"Rank {rank} has {here} before {step}, and rank {first} {there}. {_REMEDY}"
    return None


def _number(written: Written) -> str:
    """The number, which is close to either end, or its least value."""
    return f"{written.least if written.form is Form.THRESHOLD else (written.least + written.most) / 2:.6g}"


#: Forms whose numbers are compared.  Some weights may have a factor that no weight of another rank has, by
#: their names; all of a rank have it by a number of these.
_COMPARED = {
    (Form.FACTOR, Form.SCALED): "multiplied its {} by {}",
    (Form.SCALED, Form.UNCHANGED): "multiplied its {} by {}",
    (Form.STEP,): "added its gradients to its {}, times {}",
    (Form.BOUND,): "bounded its {} by {}",
    (Form.THRESHOLD,): "zeroed its {} up to {}",
    (Form.SHRUNK,): "shrunk its {} by {}",
}
_REMEDY = (
    "A rank has its part of the model in pipe.parameters and in the optimizer's groups, and a norm or a "
    "quantile of that is not the model's. opt.grad_norm() is the norm of all gradients; add up other numbers "
    "over the ranks (torch.distributed.all_reduce), or call pipe.synchronize() on all of them and change "
    "model.parameters(). Where numbers of parts are meant, this is right."
)
