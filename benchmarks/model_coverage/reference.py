"""What one process gets by accumulating gradients, and how far from it rounding may lead.

Models run in double precision.  Many compute a part of their forward in single precision all the same (a
norm, a softmax, a rotary table), and some amplify rounding errors; so the bound of a case is measured: the
lowest precision that it computes in, and how far its results move when its parameters move by a few units
in the last place of that precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.model_coverage.case import Subject
from benchmarks.model_coverage.state import buffers_of

#: The least relative error that is allowed where so much is the lowest precision.
FLOORS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 1e-2}
#: Results that move by more than this when the parameters are rounded say nothing about the compiler.
COMPARABLE = 1e-2
AMPLIFICATION = 100.0


@dataclass(frozen=True)
class Results:
    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """``results`` of eager; ``bound``: the relative error that rounding may make."""

    results: Results
    model: nn.Module
    bound: float
    epsilon: float
    random: bool  # its loss depends on the seed: its values cannot be compared


def microbatches_of(batch: Any, count: int) -> list[Any]:
    leaves, spec = pytree.tree_flatten(batch)
    return [
        pytree.tree_unflatten(
            [x.chunk(count)[m] if isinstance(x, torch.Tensor) and x.dim() else x for x in leaves], spec
        )
        for m in range(count)
    ]


def loss_of(subject: Subject, microbatch: Any) -> torch.Tensor:
    model = subject.model
    output = model(*microbatch) if isinstance(microbatch, tuple) else model(**microbatch)
    if subject.loss_fn is not None:
        return subject.loss_fn(output, microbatch)
    return output if isinstance(output, torch.Tensor) else output.loss


def accumulate(subject: Subject, batch: Any, count: int) -> Results:
    """The mean of the microbatch losses and its gradients; the model's buffers move on.

    A buffer that the forward itself adds (a table that it caches) is none of the step's results.
    """
    losses, known = [], buffers_of(subject.model).keys()
    for microbatch in microbatches_of(batch, count):
        loss = loss_of(subject, microbatch).reshape(())
        (loss / count).backward()
        losses.append(loss.detach())
    grads = {n: p.grad for n, p in subject.model.named_parameters() if p.grad is not None}
    buffers = {name: value for name, value in buffers_of(subject.model).items() if name in known}
    return Results(torch.stack(losses).mean(), grads, buffers)


class LowestPrecision(TorchDispatchMode):
    """Notes the lowest precision in which an op gives a result."""

    def __init__(self) -> None:
        super().__init__()
        self.found = torch.float64

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(leaf, torch.Tensor) and leaf.dtype in FLOORS:
                self.found = max(self.found, leaf.dtype, key=lambda d: torch.finfo(d).eps)
        return out


def moved(model: nn.Module, epsilon: float) -> None:
    """Change every parameter by some units in the last place."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.mul_((1 + 4 * epsilon * (noise - 0.5)).to(parameter.dtype))


def difference(found: Results, expected: Results, epsilon: float) -> tuple[float, str]:
    """The largest relative error, and where it is.

    An error is relative to the largest element of its tensor.  What is zero but for rounding (the gradient
    of a bias before a norm, the mean of what was normalized) has no such scale: what is as small as the
    rounding of the largest gradient, or buffer, counts as zero.
    """
    zeros = [
        AMPLIFICATION
        * epsilon
        * max((_size(t) for t in tensors.values() if t.is_floating_point()), default=0.0)
        for tensors in (expected.grads, expected.buffers)
    ]
    worst, where = _relative(found.loss, expected.loss, 0.0), "loss"
    for kind, zero, a, b in (
        ("gradient of", zeros[0], found.grads, expected.grads),
        ("buffer", zeros[1], found.buffers, expected.buffers),
    ):
        for name in b:
            if name not in a:
                if _size(b[name]) > zero:
                    return float("inf"), f"{kind} {name} is missing"
                continue
            if a[name].shape != b[name].shape or a[name].dtype != b[name].dtype:
                return float("inf"), f"{kind} {name} has another shape or type"
            error = _relative(a[name], b[name], zero)
            if not error <= worst:
                worst, where = error, f"{kind} {name}"
        for name in a.keys() - b.keys():
            if _size(a[name]) > zero:
                return float("inf"), f"{kind} {name}, which eager has not"
    return worst, where


def _size(tensor: torch.Tensor) -> float:
    if not tensor.numel():
        return 0.0
    magnitude = tensor.abs() if tensor.is_complex() else tensor.to(torch.float64).abs()
    return magnitude.max().item()


def _relative(found: torch.Tensor, expected: torch.Tensor, zero: float) -> float:
    if not expected.numel() or torch.equal(found, expected):
        return 0.0
    if expected.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    found, expected = found.to(torch.float64), expected.to(torch.float64)
    same = (found == expected) | (found.isnan() & expected.isnan())
    off = torch.where(same, 0.0, (found - expected).abs()).max().item()
    if off != off:
        return float("inf")
    off = max(off - zero, 0.0)
    scale = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0
    return off / scale if scale else (0.0 if off == 0 else float("inf"))


def refer(build, batch: Any, count: int) -> Reference:
    """Run eager twice on models of the same seed: as it is, and with its parameters moved."""
    subject = build()
    precision = LowestPrecision()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    with precision:
        results = accumulate(subject, batch, count)
    draws = not torch.equal(before, torch.get_rng_state())
    epsilon = torch.finfo(precision.found).eps
    if not torch.isfinite(results.loss):
        raise ValueError(f"the loss is {results.loss.item()}")
    if draws:
        again = build()
        torch.manual_seed(12)
        other = accumulate(again, batch, count)
        if difference(other, results, epsilon)[0] > 0:
            return Reference(results, subject.model, 0.0, epsilon, random=True)
    disturbed = build()
    moved(disturbed.model, epsilon)
    torch.manual_seed(11)
    noise, _ = difference(accumulate(disturbed, batch, count), results, epsilon)
    bound = max(FLOORS[precision.found], AMPLIFICATION * noise)
    return Reference(results, subject.model, bound, epsilon, random=False)
