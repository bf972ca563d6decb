"""The input for the source of one rank's program, and the names of its values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from fxpipe.codegen.collectives import values
from fxpipe.codegen.expressions import variable
from fxpipe.codegen.signatures import Signature, signatures
from fxpipe.ir.graph import Section, Value
from fxpipe.ir.sections import SectionEdge
from fxpipe.schedule.costs import Costs, Edge
from fxpipe.schedule.lowering.instructions import Instruction, PostRecv, Send, StartCollective
from fxpipe.schedule.ops import Activation, Color


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The input for the source of one rank's program."""

    rank: int
    title: tuple[str, ...]  # the lines that the program begins with
    sections: tuple[Section, ...]  # of the whole pipeline
    edges: tuple[SectionEdge, ...]
    placement: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    outputs: Mapping[str, Value]  # requested by the user, by name
    tensors: dict[str, torch.Tensor]  # fake tensors of the values that cross between stages
    places: Mapping[Activation, int]  # the offsets of offloaded values in the rank's pool
    costs: Costs  # predicted
    compiled: frozenset[Color] = frozenset()  # the sections that Inductor compiles

    @cached_property
    def calls(self) -> dict[Color, Signature]:
        return signatures(self.sections)

    @cached_property
    def own(self) -> tuple[Section, ...]:
        """The sections of this rank."""
        return tuple(s for s in self.sections if self.placement[s.stage] == self.rank)

    @cached_property
    def arrives_twice(self) -> frozenset[str]:
        """Values that other ranks send to more than one stage of this rank."""
        joint = {
            (a, b)
            for i in self.instructions
            if isinstance(i, StartCollective)
            for a in i.collective.sources
            for b in i.collective.targets
        }
        count: Counter[str] = Counter()
        for edge in self.edges:
            if (edge.source, edge.target) in joint:
                continue
            source, target = self.placement[edge.source.stage], self.placement[edge.target.stage]
            if target == self.rank != source:
                count.update(edge.names)
        return frozenset(name for name, times in count.items() if times > 1)

    @cached_property
    def _names(self) -> dict[tuple[Color, Color], tuple[str, ...]]:
        return {(edge.source, edge.target): edge.names for edge in self.edges}

    def names(self, edge: Edge) -> tuple[str, ...]:
        """The values of a message of this edge."""
        return self._names[edge.source, edge.target]

    def arriving(self, name: str, stage: int) -> str:
        """The variable of a received value for ``stage``; two stages of a rank may receive the same value."""
        return f"{variable(name)}_s{stage}" if name in self.arrives_twice else variable(name)

    def layouts(self) -> list[str]:
        """The names of the values whose layouts the program needs."""
        found: set[str] = set()
        for instruction in self.instructions:
            match instruction:
                case PostRecv(messages) | Send(messages):
                    found.update(name for message in messages for name in self.names(message.edge))
                case StartCollective():
                    given = values(instruction.collective, self.edges)
                    found.update(given[0] if len(given) == 1 else given[self.rank])
        return sorted(found)
