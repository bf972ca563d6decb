"""The memory that each rank of a plan needs: what it holds throughout a step, and the peak of activations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from fxpipe.plan.artifact import Plan
from fxpipe.plan.tensors import dtype_of


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    ``outputs``: of a whole batch.  ``adamw``: see ``adamw_bytes``; in no limit of ``compile``.
    ``activations``: the most that is held between ops, as simulated.
    """

    parameters: int
    gradients: int
    buffers: int
    outputs: int
    adamw: int
    activations: float

    @property
    def held(self) -> int:
        """Throughout a step."""
        return self.parameters + self.gradients + self.buffers + self.outputs

    @property
    def peak(self) -> float:
        return self.held + self.activations


def rank_memory(plan: Plan, activations: Iterable[float]) -> tuple[RankMemory, ...]:
    """The memory of each rank; activations: the peak of each."""

    def size(name: str, dtype: str = "") -> int:
        own = plan.layouts[name]
        itemsize: int = dtype_of(dtype or own.dtype).itemsize
        return prod(own.shape) * itemsize

    def gradient(name: str) -> int:
        return size(name, str(plan.gradient_dtype(dtype_of(plan.layouts[name].dtype))))

    found = []
    for rank, (own, peak) in enumerate(zip(plan.tensors, activations, strict=True)):
        outputs = (
            plan.step.microbatches * prod(output.shape) * dtype_of(output.dtype).itemsize
            for output in plan.step.outputs
            if output.rank == rank
        )
        found.append(
            RankMemory(
                parameters=sum(map(size, own.parameters)),
                gradients=sum(map(gradient, own.gradients)),
                buffers=sum(map(size, own.buffers)),
                outputs=sum(outputs),
                adamw=adamw_bytes(plan, rank),
                activations=peak,
            )
        )
    return tuple(found)


def adamw_bytes(plan: Plan, rank: int) -> int:
    """The state of AdamW on a rank: two values for each trained element, in the parameter's dtype."""
    layouts = (plan.layouts[name] for name in plan.tensors[rank].gradients)
    trained: int = sum(prod(layout.shape) * dtype_of(layout.dtype).itemsize for layout in layouts)
    return 2 * trained // (plan.replicas if plan.shard else 1)
