"""The input of a schedule: the cost of every section and of every edge between sections."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fxpipe.ir.graph import Color, Phase


class RenamedFields:
    """The fields of a stage's memory under their older names too: in files, and as deprecated attributes."""

    __slots__ = ()
    OLDER_NAMES: ClassVar[Mapping[str, str]] = {
        "saved": "saved_activations",
        "kept": "saved_for_weight",
        "away": "offloadable",
        "away_for_weight": "offloadable_for_weight",
    }

    if not TYPE_CHECKING:  # to a type checker the older names are errors

        def __getattr__(self, name: str) -> Any:
            if name not in self.OLDER_NAMES:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            newer = self.OLDER_NAMES[name]
            text = f"{type(self).__name__}.{name} is now {type(self).__name__}.{newer}"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return getattr(self, newer)


@dataclass(frozen=True, slots=True)
class StageCost(RenamedFields):
    """The cost of one microbatch on one stage.  Times in seconds, memory in bytes (or any one unit of each).

    forward, backward, weight: the times of F, B and W.
    saved_activations: live from the start of F to the end of B.
    saved_for_weight: live from the end of B to the end of W.  B frees the difference of the two.
    offloadable, offloadable_for_weight: the parts of ``saved_activations`` that can be offloaded until B and,
        as B does not read them, until W.
    """

    forward: float
    backward: float
    weight: float
    saved_activations: float = 0.0
    saved_for_weight: float = 0.0
    offloadable: float = 0.0
    offloadable_for_weight: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight


@dataclass(frozen=True, slots=True)
class Edge:
    """The values that section ``source`` computes and section ``target`` needs, for one microbatch.

    Between different ranks they are a message of ``bytes`` that takes ``seconds``; within a rank they take no
    time, and ``bytes`` are live from the end of ``source`` to the start of ``target``.
    """

    source: Color
    target: Color
    bytes: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """The link over which activations are offloaded and reloaded: ``seconds`` per byte in each direction.

    The two directions are independent.  ``ranks``: the number of neighboring ranks that share one link.
    """

    seconds: float
    ranks: int = 1


@dataclass(frozen=True)
class Costs:
    """The costs of a step.  ``link``: None if nothing can be offloaded."""

    stages: tuple[StageCost, ...]
    edges: tuple[Edge, ...]
    link: Link | None = None


def chain(stages: Sequence[StageCost], seconds: float = 0.0, bytes: float = 0.0) -> Costs:
    """The costs of a plain chain of stages: F runs down it, B runs back up."""
    edges = []
    for s in range(len(stages) - 1):
        edges.append(Edge(Color(s, Phase.F), Color(s + 1, Phase.F), bytes, seconds))
        edges.append(Edge(Color(s + 1, Phase.B), Color(s, Phase.B), bytes, seconds))
    return Costs(tuple(stages), tuple(edges))
