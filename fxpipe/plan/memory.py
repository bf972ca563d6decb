"""The memory that each rank of a plan needs: what it holds throughout a step, and the peak of activations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fxpipe.plan.artifact import HeldBytes, Plan
from fxpipe.plan.rows import ShardName


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
    return plan.held or tuple(
        HeldBytes(
            sum(plan.layouts[name].nbytes for name in tensors.parameters),
            sum(map(plan.gradient_bytes, tensors.gradients)),
            sum(plan.layouts[name].nbytes for name in tensors.buffers),
        )
        for tensors in plan.tensors
    )


def adamw_bytes(plan: Plan, rank: int) -> int:
    """The state of AdamW on a rank: two values for each trained element, in the parameter's dtype."""

    def bytes_of_process(name: ShardName) -> float:
        # With shards each process has the state of its rows.
        owners = plan.replicas * plan.lanes.divisor(name) if plan.shard else 1
        return plan.layouts[name].nbytes / owners

    return int(2 * sum(map(bytes_of_process, plan.tensors[rank].gradients)))
