"""Optimizers of ``optimizers.py``: on what an update depends, beside its own element, decides where they run.

Each is written for one process that has all parameters, as a user's script has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class Each(Optimizer):
    """Updates each parameter by itself: ``change`` gives what is subtracted, before the rate."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **options: object) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        self.begin([p for group in self.param_groups for p in group["params"] if p.grad is not None])
        for number, group in enumerate(self.param_groups):
            self.begin_group(number, group)
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["steps"] = state.get("steps", 0) + 1
                    p.sub_(group["lr"] * self.change(p, p.grad, state, group))

    def begin(self, parameters: Sequence[torch.Tensor]) -> None:
        """Before an update of all."""

    def begin_group(self, number: int, group: dict[str, Any]) -> None:
        """Before an update of a group."""

    def change(
        self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> torch.Tensor:
        raise NotImplementedError


def momentum(state: dict[str, Any], g: torch.Tensor, share: float = 0.9) -> torch.Tensor:
    mean: torch.Tensor = state.setdefault("momentum", torch.zeros_like(g))
    return mean.mul_(share).add_(g, alpha=1 - share)


def squares(state: dict[str, Any], g: torch.Tensor, share: float = 0.95) -> torch.Tensor:
    mean: torch.Tensor = state.setdefault("squares", torch.zeros_like(g))
    return mean.mul_(share).addcmul_(g, g, value=1 - share)


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """About the nearest matrix whose singular values are 1, by five steps of Newton and Schulz."""
    wide = x if x.shape[0] <= x.shape[1] else x.T
    y = wide / (wide.norm() + 1e-12)
    for _ in range(5):
        products = y @ y.T
        y = 3.4445 * y + (2.0315 * products @ products - 4.775 * products) @ y
    return y if x.shape[0] <= x.shape[1] else y.T


class Lion(Each):
    def change(self, p, g, state, group):
        mean = state.setdefault("momentum", torch.zeros_like(g))
        sign = (0.9 * mean + 0.1 * g).sign()
        mean.lerp_(g, 0.01)
        return sign + 0.1 * p


class LAMB(Each):
    """The step of a tensor is as long as the tensor, times the rate."""

    def change(self, p, g, state, group):
        step = momentum(state, g) / (squares(state, g).sqrt() + 1e-8) + 0.01 * p
        return step * (p.norm() / (step.norm() + 1e-12)).clamp(max=10.0)


class LARS(Each):
    """As LAMB, for matrices alone: vectors take plain steps."""

    def change(self, p, g, state, group):
        return g if p.ndim < 2 else momentum(state, g * 0.1 * p.norm() / (g.norm() + 1e-12))


class MuonByFlag(Each):
    """Orthogonal steps for the groups with ``use_muon``, Adam's for the others."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, use_muon: bool = False) -> None:
        super().__init__(params, lr, use_muon=use_muon)

    def change(self, p, g, state, group):
        mean = momentum(state, g)
        return orthogonal(mean) if group["use_muon"] else mean / (squares(state, g).sqrt() + 1e-8)


class MuonByShape(Each):
    """Orthogonal steps for matrices of at least 20 rows and columns."""

    def change(self, p, g, state, group):
        mean = momentum(state, g)
        return orthogonal(mean) if p.ndim == 2 and min(p.shape) >= 20 else 0.01 * mean.sign()


class MuonLate(Each):
    """Orthogonal steps for matrices, from the eighth on."""

    def change(self, p, g, state, group):
        return orthogonal(g) if p.ndim == 2 and state["steps"] > 7 else g.clamp(-0.1, 0.1)


class Shampoo(Each):
    """The inverse fourth root of the products of rows, and of columns, on both sides of a matrix."""

    def change(self, p, g, state, group):
        if p.ndim != 2:
            return g / (squares(state, g).sqrt() + 1e-6)
        left = state.setdefault("left", 1e-4 * torch.eye(len(g), dtype=g.dtype))
        right = state.setdefault("right", 1e-4 * torch.eye(g.shape[1], dtype=g.dtype))
        left.add_(g @ g.T)
        right.add_(g.T @ g)
        return self.root(left) @ g @ self.root(right)

    @staticmethod
    def root(x: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(x)
        return (vectors * values.clamp(min=1e-8) ** -0.25) @ vectors.T


class ScheduleFree(Optimizer):
    """SGD whose parameters lie between the iterates and their average; ``eval`` gives the average."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "trains": False, "updates": 0})

    def train(self) -> None:
        self._switch(True, 0.1)

    def eval(self) -> None:
        self._switch(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def _switch(self, trains: bool, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["trains"] != trains else ():
                if "iterate" in self.state[p]:
                    p.lerp_(self.state[p]["iterate"], weight)
            group["trains"] = trains

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            assert group["trains"], "call train() before step()"
            group["updates"] += 1
            for p in group["params"]:
                iterate = self.state[p].setdefault("iterate", p.clone())
                p.lerp_(iterate, 1 / group["updates"]).sub_(p.grad, alpha=0.1 * group["lr"])
                iterate.sub_(p.grad, alpha=group["lr"])


def rounded(x: torch.Tensor, blocks: int | None) -> torch.Tensor:
    """A tensor in 8 bits, scaled by its largest element, or by that of each block of so many."""
    flat = x.reshape(-1)
    parts = [flat] if blocks is None else flat.split(blocks)
    scaled = [(part / (s := part.abs().max() / 127 + 1e-30)).round() * s for part in parts]
    return torch.cat(scaled).view_as(x)


class EightBits(Each):
    """A momentum of 8 bits, in blocks that do not know of rows."""

    blocks: int | None = 64

    def change(self, p, g, state, group):
        state["momentum"] = rounded(0.9 * state.get("momentum", torch.zeros_like(g)) + g, self.blocks)
        return state["momentum"]


class EightBitsByTensor(EightBits):
    blocks = None


class EightBitsOfLarge(EightBits):
    """As large tables have it; small ones keep theirs in all bits."""

    def change(self, p, g, state, group):
        return super().change(p, g, state, group) if p.numel() >= 1024 else momentum(state, g)


class FactoredAbove(Each):
    """Squares by rows and columns for matrices of 1024 elements and more, and of each element for others."""

    def change(self, p, g, state, group):
        if p.ndim != 2 or p.numel() < 1024:
            return g / (squares(state, g).sqrt() + 1e-8)
        rows = state.setdefault("rows", torch.zeros_like(g[:, :1])).lerp_(g.square().mean(1, True), 0.05)
        columns = state.setdefault("columns", torch.zeros_like(g[:1])).lerp_(g.square().mean(0, True), 0.05)
        return g / ((rows * columns / (rows.mean() + 1e-30)).sqrt() + 1e-8)


class CountsCalls(Each):
    """A rate by a number that is in no state."""

    def begin(self, parameters):
        self.calls = getattr(self, "calls", 0) + 1

    def change(self, p, g, state, group):
        return g / self.calls**0.5


class CountsByGroup(Each):
    """Of each group the updates with large gradients, in no state; a group that is empty counts none."""

    def begin_group(self, number, group):
        counts = self.__dict__.setdefault("counts", [0] * len(self.param_groups))
        if group.get("counts"):
            counts[number] += any(float(p.grad.abs().max()) > 0.05 for p in group["params"])
        self.count = counts[number]

    def change(self, p, g, state, group):
        return g / (1 + self.count)


class CountsInGroup(Each):
    """The same number for all ranks, in the group's options."""

    def begin_group(self, number, group):
        group["calls"] = group.get("calls", 0) + 1

    def change(self, p, g, state, group):
        return g / group["calls"] ** 0.5


class ClipsAll(Each):
    """Clips by the norm of all of its parameters, where that is above 20."""

    def begin(self, parameters):
        norms = [p.grad.norm() for p in parameters]
        self.factor = min(1.0, 20.0 / float(torch.stack(norms).norm() + 1e-12)) if norms else 1.0

    def change(self, p, g, state, group):
        return g * self.factor


class ClipsGroups(Each):
    """Clips by the norm of each group."""

    def begin_group(self, number, group):
        norms = [p.grad.norm() for p in group["params"]]
        self.factor = min(1.0, 5.0 / float(torch.stack(norms).norm() + 1e-12)) if norms else 1.0

    def change(self, p, g, state, group):
        return g * self.factor


class ClipsTensors(Each):
    """Clips the size of each tensor's step, where that is above a limit."""

    def change(self, p, g, state, group):
        step = momentum(state, g)
        return step / max(1.0, float(step.square().mean().sqrt()) / 0.05)


class Normalized(Each):
    """The step of each tensor has the norm 1."""

    def change(self, p, g, state, group):
        return momentum(state, g) / (state["momentum"].norm() + 1e-12)


class NormalizedRows(Each):
    """The step of each row has the norm 1."""

    def change(self, p, g, state, group):
        return g / (g.norm(dim=-1, keepdim=True) + 1e-12) if p.ndim == 2 else g.clamp(-1, 1)


class CentralizedRows(Each):
    """Gradients less the mean of their row."""

    def change(self, p, g, state, group):
        return momentum(state, g - g.mean(1, keepdim=True) if p.ndim == 2 else g)


class CentralizedColumns(Each):
    """Gradients less the mean of their column."""

    def change(self, p, g, state, group):
        return momentum(state, g - g.mean(0, keepdim=True) if p.ndim == 2 else g)


class LowRank(Each):
    """Momentum in the space of the largest singular vectors, found anew in every fifth update, for matrices
    with more rows and columns than that space."""

    def change(self, p, g, state, group):
        if p.ndim != 2 or min(p.shape) <= 8:
            return momentum(state, g)
        if state["steps"] % 5 == 1:
            state["basis"] = torch.linalg.svd(g, full_matrices=False).U[:, :8].contiguous()
        basis = state["basis"]
        return basis @ momentum(state, basis.T @ g)


class Median(Each):
    """Drops elements below the median of their tensor."""

    def change(self, p, g, state, group):
        return torch.where(g.abs() >= g.abs().median(), g, 0.0)


class Noisy(Each):
    """Adds random numbers to its steps."""

    def change(self, p, g, state, group):
        return g + 0.01 * torch.randn_like(g)


class Masters(Each):
    """Keeps a copy of each parameter in float64, and gives that its steps."""

    def change(self, p, g, state, group):
        master = state.setdefault("master", p.double().clone())
        master.sub_(group["lr"] * momentum(state, g).double())
        return (p - master) / group["lr"]


MATRICES = ["blocks.*er.weight", "head.weight"]
#: Name -> class, options, and groups by patterns of the model's names.
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], list[dict[str, Any]]]] = {
    "torch SGD, Nesterov": (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9, "nesterov": True}, []),
    "torch AdamW, groups": (
        torch.optim.AdamW,
        {"lr": 1e-3},
        [{"params": ["*.bias", "*norm*"], "weight_decay": 0.0}],
    ),
    "torch Adam, AMSGrad": (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True}, []),
    "torch Adagrad": (torch.optim.Adagrad, {"lr": 1e-3}, []),
    "torch Adadelta": (torch.optim.Adadelta, {"lr": 1.0}, []),
    "torch Adamax": (torch.optim.Adamax, {"lr": 1e-3}, []),
    "torch NAdam": (torch.optim.NAdam, {"lr": 1e-3}, []),
    "torch RAdam": (torch.optim.RAdam, {"lr": 1e-3}, []),
    "torch RMSprop, centered": (torch.optim.RMSprop, {"lr": 1e-4, "centered": True, "momentum": 0.5}, []),
    "torch Rprop": (torch.optim.Rprop, {"lr": 1e-4}, []),
    "torch ASGD": (torch.optim.ASGD, {"lr": 1e-4, "t0": 5.0}, []),
    "torch Adafactor": (torch.optim.Adafactor, {"lr": 1e-3}, []),
    "torch Muon and AdamW": (
        torch.optim.AdamW,
        {"lr": 1e-3},
        [{"params": MATRICES, "class": torch.optim.Muon, "lr": 1e-3}],
    ),
    "Muon by a group's flag": (MuonByFlag, {"lr": 1e-3}, [{"params": MATRICES, "use_muon": True}]),
    "Muon by shape": (MuonByShape, {"lr": 1e-3}, []),
    "Muon from a step on": (MuonLate, {"lr": 1e-3}, []),
    "Lion": (Lion, {"lr": 1e-4}, []),
    "LAMB": (LAMB, {"lr": 1e-3}, []),
    "LARS": (LARS, {"lr": 1e-3}, []),
    "Shampoo": (Shampoo, {"lr": 1e-3}, []),
    "schedule-free": (ScheduleFree, {"lr": 1e-4}, []),
    "8 bits in blocks": (EightBits, {"lr": 1e-4}, []),
    "8 bits by tensor": (EightBitsByTensor, {"lr": 1e-4}, []),
    "8 bits of large tables": (EightBitsOfLarge, {"lr": 1e-4}, []),
    "factored above a size": (FactoredAbove, {"lr": 1e-3}, []),
    "a counter in an attribute": (CountsCalls, {"lr": 1e-4}, []),
    "counters by group": (CountsByGroup, {"lr": 1e-4}, [{"params": ["*.bias"], "counts": True}]),
    "a counter in options": (CountsInGroup, {"lr": 1e-4}, [{"params": ["*.bias"], "lr": 1e-3}]),
    "clips by the norm of all": (ClipsAll, {"lr": 1e-3}, []),
    "clips by norms of groups": (ClipsGroups, {"lr": 1e-3}, [{"params": ["*.bias", "*norm*"]}]),
    "clips by tensor": (ClipsTensors, {"lr": 1e-2}, []),
    "norm 1 by tensor": (Normalized, {"lr": 1e-2}, []),
    "norm 1 by row": (NormalizedRows, {"lr": 1e-3}, []),
    "centered rows": (CentralizedRows, {"lr": 1e-4}, []),
    "centered columns": (CentralizedColumns, {"lr": 1e-4}, []),
    "low rank": (LowRank, {"lr": 1e-4}, []),
    "drops below the median": (Median, {"lr": 1e-4}, []),
    "random numbers": (Noisy, {"lr": 1e-4}, []),
    "own masters": (Masters, {"lr": 1e-4}, []),
}
