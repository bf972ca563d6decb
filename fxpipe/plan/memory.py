"""The memory that each rank of a plan needs: what it holds throughout a step, and the peak of activations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from fxpipe.plan.artifact import HeldBytes, Plan
from fxpipe.plan.rows import ShardName
from fxpipe.plan.tensors import dtype_of


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    ``adamw``: see ``adamw_bytes``; 0 where ``fixed`` has the optimizer's state.
    ``activations``: the most that is held between ops, as simulated.
    """

    fixed: HeldBytes
    adamw: int
    activations: float

    @property
    def other(self) -> int:
        """The bytes beside parameters and gradients."""
        return self.fixed.total - self.fixed.parameters - self.fixed.gradients

    @property
    def peak(self) -> float:
        return self.fixed.total + self.activations


def rank_memory(plan: Plan, activations: Iterable[float]) -> tuple[RankMemory, ...]:
    """The memory of each rank; activations: the peak of each."""
    return tuple(
        RankMemory(fixed, 0 if fixed.optimizer else adamw_bytes(plan, rank), peak)
        for rank, (fixed, peak) in enumerate(zip(held_bytes(plan), activations, strict=True))
    )


def held_bytes(plan: Plan) -> tuple[HeldBytes, ...]:
    """The bytes of each rank; by an earlier version's plan of its tensors alone, as in one replica."""

    def size(name: str, *, gradient: bool = False) -> int:
        layout = plan.layouts[name]
        dtype = dtype_of(layout.dtype)
        itemsize: int = (plan.gradient_dtype(dtype) if gradient else dtype).itemsize
        return prod(layout.shape) * itemsize

    return plan.held or tuple(
        HeldBytes(
            sum(map(size, tensors.parameters)),
            sum(size(name, gradient=True) for name in tensors.gradients),
            sum(map(size, tensors.buffers)),
        )
        for tensors in plan.tensors
    )


def adamw_bytes(plan: Plan, rank: int) -> int:
    """The state of AdamW on a rank: two values for each trained element, in the parameter's dtype."""

    def gradient_bytes(name: ShardName) -> float:
        layout = plan.layouts[name]
        # With shards each process has the state of its rows.
        owners = plan.replicas * plan.lanes.divisor(name) if plan.shard else 1
        itemsize: int = dtype_of(layout.dtype).itemsize
        return prod(layout.shape) * itemsize / owners

    return int(2 * sum(map(gradient_bytes, plan.tensors[rank].gradients)))
