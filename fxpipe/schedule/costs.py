"""The input of a schedule: the cost of every section and of every edge between sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Generic, NamedTuple, TypeVar

from fxpipe.schedule.ops import Color, Phase, Validation
from fxpipe.strict import NonNegative, at_least, entries

MOST_STAGES = 1 << 31
#: The times of a ``StageCost``, by phase.
TIMES = {Phase.F: "forward", Phase.B: "backward", Phase.W: "weight"}

_T = TypeVar("_T")


class StageBytes(NamedTuple, Generic[_T]):
    """One thing for each kind of memory in a ``StageCost``: its storages, or an expression of its bytes."""

    saved_activations: _T
    saved_for_weight: _T
    offloadable: _T
    offloadable_for_weight: _T


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of one microbatch on one stage.  Times in seconds, memory in bytes (or any one unit of each).

    forward, backward, weight: the times of F, B and W.
    saved_activations: live from the start of F to the end of B.
    saved_for_weight: live from the end of B to the end of W.  B frees the difference of the two.
    offloadable, offloadable_for_weight: the parts of ``saved_activations`` that can be offloaded until B and,
        as B does not read them, until W.
    """

    forward: NonNegative
    backward: NonNegative
    weight: NonNegative
    saved_activations: NonNegative = 0.0
    saved_for_weight: NonNegative = 0.0
    offloadable: NonNegative = 0.0
    offloadable_for_weight: NonNegative = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight


@dataclass(frozen=True, slots=True)
class Edge:
    """The values that section ``source`` computes and section ``target`` needs, for one microbatch.

    Between different ranks they are a message of ``bytes`` that takes ``seconds``, or ``inter_seconds``
    between different machines (None: ``seconds`` there too).  Within a rank ``bytes`` are live from the end
    of ``source`` to the start of ``target``, and take no time but for ``exchange``: the seconds in which the
    lanes of the rank exchange some of them.
    """

    source: Color
    target: Color
    bytes: NonNegative = 0.0
    seconds: NonNegative = 0.0
    inter_seconds: NonNegative | None = None
    exchange: NonNegative = 0.0


_Record = TypeVar("_Record", StageCost, Edge)


@dataclass(frozen=True, slots=True)
class Link:
    """The link over which activations are offloaded and reloaded: ``seconds`` per byte in each direction.

    The two directions are independent.  ``ranks``: the number of neighboring ranks that share one link.
    """

    seconds: NonNegative
    ranks: Annotated[int, at_least(1)] = 1


@dataclass(frozen=True, slots=True)
class Exchange:
    """The seconds in which replicas exchange what they have of one stage.

    ``sum``: of its gradients, behind the last op that makes one.  ``gather``: of its parameters, before the
    first op; 0 where each replica has all of them.  ``per_use``: both for all ops that follow each other,
    instead of once a step.
    """

    sum: NonNegative
    gather: NonNegative = 0.0
    per_use: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """The update of the parameters behind a step, and the messages by which ranks learn that it is right.

    ``seconds``: of the optimizer, and of what the next step makes once of its weights, on each rank; empty
    for no time.  ``copies``: of the copies that undo an update, which post-validation makes.  ``message``:
    seconds in which a few numbers travel between two ranks, ``inter_message``: between different machines
    (None: as ``message``).
    """

    seconds: tuple[NonNegative, ...] = ()
    copies: tuple[NonNegative, ...] = ()
    message: NonNegative = 0.0
    inter_message: NonNegative | None = None


@dataclass(frozen=True)
class Costs:
    """The costs of a step.  ``link``: None if nothing can be offloaded.  ``exchanges``: of each stage; empty
    for a pipeline without replicas.  ``update``: behind the step.

    ``ranks_per_machine``: the first so many ranks share a machine, the next so many another one; None if all
    ranks share one.
    """

    stages: Annotated[tuple[StageCost, ...], entries(1, MOST_STAGES)]
    edges: tuple[Edge, ...]
    link: Link | None = None
    ranks_per_machine: Annotated[int, at_least(1)] | None = None
    exchanges: tuple[Exchange, ...] = ()
    update: Update = Update()

    @property
    def of_ops(self) -> Costs:
        """The costs of ops and messages alone, without what replicas exchange."""
        return replace(self, exchanges=()) if self.exchanges else self

    def message_seconds(self, edge: Edge, placement: tuple[int, ...]) -> float:
        """The time of an edge's message if stage s runs on rank ``placement[s]``, or of its exchange between
        the lanes of that rank."""
        source, target = placement[edge.source.stage], placement[edge.target.stage]
        return edge.exchange + self._between(source, target, edge.seconds, edge.inter_seconds)

    def verdict_seconds(self, source: int, target: int) -> float:
        """The time in which a rank tells another one what its gradients hold; 0 within a rank."""
        return self._between(source, target, self.update.message, self.update.inter_message)

    def update_seconds(self, rank: int, validation: Validation) -> float:
        """The time of the optimizer's update on a rank, with the copies that undo it."""
        update = self.update
        seconds = update.seconds[rank] if update.seconds else 0.0
        return seconds + (update.copies[rank] if update.copies and validation == "post" else 0.0)

    def _between(self, source: int, target: int, seconds: float, inter_seconds: float | None) -> float:
        if source == target:
            return 0.0
        size = self.ranks_per_machine
        if inter_seconds is None or size is None or source // size == target // size:
            return seconds
        return inter_seconds


def most_of(costs: Sequence[Costs]) -> Costs:
    """The largest of each number of a microbatch, of several with the same sections and messages."""
    # Each once: most microbatches are of a few lengths.
    first, *others = dict.fromkeys(costs)
    if not others:
        return first
    stages, edges = (
        zip(*each, strict=True) for each in ([c.stages for c in costs], [c.edges for c in costs])
    )
    return replace(first, stages=tuple(map(_most_of, stages)), edges=tuple(map(_most_of, edges)))


def _most_of(records: Sequence[_Record]) -> _Record:
    """The first of some records, with the largest of each of their numbers."""
    numbers = {
        each.name: max(getattr(record, each.name) for record in records)
        for each in fields(records[0])
        if isinstance(getattr(records[0], each.name), int | float)
    }
    return replace(records[0], **numbers)


def chain(
    stages: Sequence[StageCost],
    seconds: float = 0.0,
    bytes: float = 0.0,
    inter_seconds: float | None = None,
    ranks_per_machine: int | None = None,
) -> Costs:
    """The costs of a plain chain of stages: F runs down it, B runs back up."""
    edges = []
    for s in range(len(stages) - 1):
        for source, target, phase in ((s, s + 1, Phase.F), (s + 1, s, Phase.B)):
            edges.append(Edge(Color(source, phase), Color(target, phase), bytes, seconds, inter_seconds))
    return Costs(tuple(stages), tuple(edges), ranks_per_machine=ranks_per_machine)
