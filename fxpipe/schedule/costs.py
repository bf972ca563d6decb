"""The input of a schedule: the cost of every section and of every edge between sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.ir.graph import Color, Phase


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of one microbatch on one stage.  Times in seconds, memory in bytes (or any one unit of each).

    ``saved`` is live from the start of F to the end of B, ``kept`` from the end of B to the end of W:
    F allocates ``saved``, B frees ``saved - kept``, W frees ``kept``.  Of ``saved``, ``away`` can be
    offloaded until B, and ``away_for_weight``, which B does not read, until W.
    """

    forward: float
    backward: float
    weight: float
    saved: float = 0.0
    kept: float = 0.0
    away: float = 0.0
    away_for_weight: float = 0.0

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
