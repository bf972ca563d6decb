"""What a schedule is fed with: the cost of every section and of every transfer between sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.ir.graph import Colour, Phase


@dataclass(frozen=True, slots=True)
class StageCost:
    """One microbatch through one stage.  Times in seconds, memory in bytes (or any one unit of each).

    ``saved`` is live from the start of F to the end of B, ``kept`` from the end of B to the end of W:
    F adds ``saved``, B frees ``saved - kept``, W frees ``kept``.  Of what F saved, ``away`` may leave the
    rank until B, and ``away_for_weight``, which B has no use for, until W.
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
    """A value set that section ``source`` computes and section ``target`` needs, both of one microbatch.

    It takes ``seconds`` (and is a message of ``bytes``) where the two stages lie on different ranks; where
    they share one it takes no time, and ``bytes`` are held from the one section's end to the other's start.
    """

    source: Colour
    target: Colour
    bytes: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """The way between ranks and where activations go: so many seconds for each byte, out as well as back.

    The two directions do not disturb each other.  ``ranks``: so many neighbouring ones take turns on a link.
    """

    seconds: float
    ranks: int = 1


@dataclass(frozen=True)
class Costs:
    """``link``: None where nothing can leave a rank."""

    stages: tuple[StageCost, ...]
    edges: tuple[Edge, ...]
    link: Link | None = None


def chain(stages: Sequence[StageCost], seconds: float = 0.0, bytes: float = 0.0) -> Costs:
    """The costs of a plain chain of stages: F runs down it, B runs back up."""
    edges = []
    for s in range(len(stages) - 1):
        edges.append(Edge(Colour(s, Phase.F), Colour(s + 1, Phase.F), bytes, seconds))
        edges.append(Edge(Colour(s + 1, Phase.B), Colour(s, Phase.B), bytes, seconds))
    return Costs(tuple(stages), tuple(edges))
