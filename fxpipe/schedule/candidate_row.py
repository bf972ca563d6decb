"""A candidate of a search as ``plan.json`` and ``fxpipe explain`` have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fxpipe.strict import Fits, NonNegative, Share, at_least, between

Recompute = Annotated[str, Fits(("", "norms", "full").__contains__, "empty, 'norms' or 'full'")]
"""A level of recomputation."""


@dataclass(frozen=True)
class Tried:
    """A schedule that was tried: its simulated costs, or the reason (``why``) that it was left out.

    ``seconds`` a step; ``peak_memory``: of the rank that needs the most; of one that was left out because it
    does not fit, the smallest limit that it would keep.
    ``stages_per_rank`` are the model's own.
    Memory is in the unit of the costs: bytes for a compiled model.
    """

    schedule: str
    stages_per_rank: Annotated[int, at_least(1)]
    placement: str
    seconds: NonNegative | None = None
    span_bubble: Share | None = None
    peak_memory: NonNegative | None = None
    why: str = ""
    barriers: Annotated[int, between(0, 2)] = 0
    """Those of a microbatch where vocabulary layers are split over the ranks, else 0."""
    recompute: Recompute = ""
    """The level of recomputation; "" for none."""
    offloaded: NonNegative = 0.0
    """The memory that is offloaded in a step."""
    offloads: bool = False
    """Whether ``peak_memory`` of one that does not fit is with as much offload as the links carry."""
    least: NonNegative | None = None
    """Of one that was left out because another is faster: the seconds that it takes at least."""
    period: NonNegative | None = None
    """Seconds a step of many with post-validation, where schedules are compared by it."""
    head_chunks: Annotated[int, at_least(1)] = 1
    """The parts of the output layer."""
    parts: Annotated[int, at_least(1)] = 1
    """The most parts of a stage."""

    @property
    def compared(self) -> float | None:
        """The seconds by which it is compared with others."""
        return self.seconds if self.period is None else self.period
