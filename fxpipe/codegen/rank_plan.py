"""The input for the source of one rank's program, and the names of its values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from fxpipe.codegen.expressions import variable
from fxpipe.codegen.signatures import Signature
from fxpipe.ir.builder import node_arg
from fxpipe.ir.graph import Section, Value, batch_mean
from fxpipe.ir.sections import SectionEdge
from fxpipe.plan.artifact import Bucket
from fxpipe.schedule.costs import Costs, Edge
from fxpipe.schedule.lowering.instructions import (
    Collective,
    CollectiveKind,
    Instruction,
    PostRecv,
    Send,
    StartCollective,
)
from fxpipe.schedule.ops import Activation, Color, OpKind, Phase

Sizes = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides, whose numbers may be expressions of lengths."""


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The input for the source of one rank's program."""

    rank: int
    title: tuple[str, ...]  # the lines that the program begins with
    sections: tuple[Section, ...]  # of the whole pipeline
    calls: Mapping[Color, Signature]  # of all sections
    edges: tuple[SectionEdge, ...]
    placement: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    outputs: Mapping[str, Value]  # requested by the user, by name
    tensors: dict[str, torch.Tensor]  # fake tensors of the values that cross between stages
    places: Mapping[Activation, int]  # the offsets of offloaded values in the rank's pool
    costs: Costs  # predicted
    joined: frozenset[int]  # the stages that run every B and W as one op
    buckets: tuple[tuple[Bucket, int], ...] = ()  # over replicas, each with the bytes of its parameters
    compiled: frozenset[Color] = frozenset()  # the sections that Inductor compiles
    lengths: Mapping[str, str] = field(default_factory=dict)  # variable -> name, of those of a microbatch
    sizes: Mapping[str, Sizes] = field(default_factory=dict)  # of values that cross, where they have lengths

    @cached_property
    def own(self) -> tuple[Section, ...]:
        """The sections of this rank."""
        return tuple(s for s in self.sections if self.placement[s.stage] == self.rank)

    def op_name(self, color: Color) -> str:
        """The name of the op that runs a section."""
        is_joined = color.stage in self.joined and color.phase is not Phase.F
        return f"{OpKind.BW if is_joined else color.phase}{color.stage}"

    def own_end(self, colors: tuple[Color, ...]) -> Color:
        """The source or target of a collective: of several, that of this rank."""
        return colors[self.rank] if len(colors) > 1 else colors[0]

    @cached_property
    def once(self) -> dict[fx.Node, str]:
        """The nodes that compute what this rank computes once a step, with the names of their values."""
        return {node: name for node, name in self._computed.items() if node.target is not batch_mean}

    @cached_property
    def counts(self) -> dict[fx.Node, str]:
        """The nodes that compute, of each microbatch, what the rank takes the mean of over the batch, with
        the names of the means."""
        means = ((node, name) for node, name in self._computed.items() if node.target is batch_mean)
        return {node_arg(node, 0): name for node, name in means}

    @cached_property
    def _computed(self) -> dict[fx.Node, str]:
        inputs = (n.meta.get("input") for s in self.own for n in s.graph.find_nodes(op="placeholder"))
        return {x.computed: x.name for x in inputs if x is not None and x.computed is not None}

    @cached_property
    def arrives_twice(self) -> frozenset[str]:
        """Values that other ranks send to more than one stage of this rank, by messages or by a broadcast to
        its vocabulary stage."""
        joint = {
            (a, b)
            for collective in self.collected
            if collective.kind is not CollectiveKind.BROADCAST
            for a in collective.sources
            for b in collective.targets
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

    @cached_property
    def sums(self) -> dict[str, str]:
        """By summand the name of the sum."""
        return {name: total for edge in self.edges for name, total in edge.sums.items()}

    @cached_property
    def collected(self) -> dict[Collective, tuple[tuple[str, ...], ...]]:
        """Per collective and source of it, the names of the values that it sends, the same to all targets."""
        joined = {i.collective for i in self.instructions if isinstance(i, StartCollective)}
        sent = self._names
        return {
            c: tuple(next(sent[s, t] for t in c.targets if (s, t) in sent) for s in c.sources) for c in joined
        }

    def arriving(self, name: str, stage: int) -> str:
        """The variable of a received value for ``stage``; two stages of a rank may receive the same value."""
        return f"{variable(name)}_s{stage}" if name in self.arrives_twice else variable(name)

    def layout(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """The layout of a value that crosses, as a program says it."""
        tensor = self.tensors[name]
        shape, stride = self.sizes.get(name, (tuple(tensor.shape), tuple(tensor.stride())))
        return shape, stride, tensor.dtype

    def layouts(self) -> list[str]:
        """The names of the values whose layouts the program needs."""
        names: set[str] = set()
        for instruction in self.instructions:
            match instruction:
                case PostRecv(messages) | Send(messages):
                    names.update(name for message in messages for name in self.names(message.edge))
                case StartCollective():
                    of_ranks = self.collected[instruction.collective]
                    names.update(of_ranks[0] if len(of_ranks) == 1 else of_ranks[self.rank])
        return sorted(names)
