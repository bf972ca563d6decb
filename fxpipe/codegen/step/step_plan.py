"""The input for the source of a rank's function ``step``: data alone, so that a saved pipeline keeps it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fxpipe.codegen.expressions import variable
from fxpipe.codegen.signatures import Result, Signature
from fxpipe.ir.sections import SectionEdge
from fxpipe.schedule.costs import Edge
from fxpipe.schedule.lowering import instructions as ins
from fxpipe.schedule.ops import Activation, Color, OpKind, Phase


@dataclass(frozen=True)
class OnceCalls:
    """What a rank computes before its first section: the arguments of ``once_a_step``, and those of
    ``counts`` beside the batch; None where its program has no such function."""

    once: tuple[str, ...] | None
    counts: tuple[str, ...] | None


@dataclass(frozen=True)
class StepParts:
    """What the functions ``step`` of all ranks are written from, for any order of ops.

    ``calls``: of all sections.  ``outputs``: requested by the user, by name.  ``before``: of each rank.
    ``lengths``: variable -> name, of those of a microbatch.  ``per_use``: whether replicas gather parameters
    for each use.
    """

    calls: tuple[Signature, ...]
    edges: tuple[SectionEdge, ...]
    outputs: dict[str, Result]
    before: tuple[OnceCalls, ...]
    lengths: dict[str, str]
    per_use: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class StepPlan:
    """The input for the source of one rank's function ``step``."""

    rank: int
    parts: StepParts
    placement: tuple[int, ...]
    instructions: tuple[ins.Instruction, ...]
    joined: frozenset[int]  # the stages that run every B and W as one op
    places: Mapping[Activation, int] = field(default_factory=dict)  # of offloaded values in the rank's pool
    by_place: bool = False  # whether numbers are places, of which ``rt`` knows the replica's microbatches

    @cached_property
    def calls(self) -> dict[Color, Signature]:
        """The calls of all sections."""
        return {call.color: call for call in self.parts.calls}

    @property
    def lengths(self) -> Mapping[str, str]:
        return self.parts.lengths

    @property
    def before(self) -> OnceCalls:
        """The calls before this rank's first section."""
        return self.parts.before[self.rank]

    def op_name(self, color: Color) -> str:
        """The name of the op that runs a section."""
        is_joined = color.stage in self.joined and color.phase is not Phase.F
        return f"{OpKind.BW if is_joined else color.phase}{color.stage}"

    def own_end(self, colors: tuple[Color, ...]) -> Color:
        """The source or target of a collective: of several, that of this rank."""
        return colors[self.rank] if len(colors) > 1 else colors[0]

    @cached_property
    def arrives_twice(self) -> frozenset[str]:
        """Values that other ranks send to more than one stage of this rank, by messages or by a broadcast to
        its vocabulary stage."""
        joint = {
            (a, b)
            for collective in self.collected
            if collective.kind is not ins.CollectiveKind.BROADCAST
            for a in collective.sources
            for b in collective.targets
        }
        count: Counter[str] = Counter()
        for edge in self.parts.edges:
            if (edge.source, edge.target) in joint:
                continue
            source, target = self.placement[edge.source.stage], self.placement[edge.target.stage]
            if target == self.rank != source:
                count.update(edge.names)
        return frozenset(name for name, times in count.items() if times > 1)

    @cached_property
    def _names(self) -> dict[tuple[Color, Color], tuple[str, ...]]:
        return {(edge.source, edge.target): edge.names for edge in self.parts.edges}

    def names(self, edge: Edge) -> tuple[str, ...]:
        """The values of a message of this edge."""
        return self._names[edge.source, edge.target]

    @cached_property
    def sums(self) -> dict[str, str]:
        """Map a summand to the name of its sum."""
        return {name: total for edge in self.parts.edges for name, total in edge.sums.items()}

    @cached_property
    def collected(self) -> dict[ins.Collective, tuple[tuple[str, ...], ...]]:
        """Per collective and source of it, the names of the values that it sends, the same to all targets."""
        joined = {i.collective for i in self.instructions if isinstance(i, ins.StartCollective)}
        sent = self._names
        return {
            c: tuple(next(sent[s, t] for t in c.targets if (s, t) in sent) for s in c.sources) for c in joined
        }

    def arriving(self, name: str, stage: int) -> str:
        """The variable of a received value for ``stage``; two stages of a rank may receive the same value."""
        return f"{variable(name)}_s{stage}" if name in self.arrives_twice else variable(name)

    def layouts(self) -> list[str]:
        """The names of the values whose layouts the program needs."""
        names: set[str] = set()
        for instruction in self.instructions:
            match instruction:
                case ins.PostRecv(messages) | ins.Send(messages):
                    names.update(name for message in messages for name in self.names(message.edge))
                case ins.StartCollective():
                    of_ranks = self.collected[instruction.collective]
                    names.update(of_ranks[0] if len(of_ranks) == 1 else of_ranks[self.rank])
        return sorted(names)
