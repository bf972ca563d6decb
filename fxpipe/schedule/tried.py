"""A candidate of a search as ``plan.json`` and ``fxpipe explain`` have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Tried:
    """A schedule that was tried: its simulated costs, or the reason (``why``) that it was left out.

    ``seconds`` a step; ``peak_memory``: of the rank that needs the most.  ``stages_per_rank`` are the model's
    own.  ``barriers``: a microbatch, of vocabulary layers split over the ranks, 0 if they are not.
    ``recompute``: the level of recomputation, empty for none.  ``offloaded``: memory offloaded in a step.
    Memory is in the unit of the costs: bytes for a compiled model.
    """

    OLDER_NAMES: ClassVar[Mapping[str, str]] = {"moved": "offloaded"}

    schedule: str
    stages_per_rank: int
    placement: str
    seconds: float | None = None
    span_bubble: float | None = None
    peak_memory: float | None = None
    why: str = ""
    barriers: int = 0
    recompute: str = ""
    offloaded: float = 0.0
