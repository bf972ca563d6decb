"""The input for the source of one rank's program, and the names of its values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from fxpipe.codegen.step.step_plan import OnceCalls, StepPlan
from fxpipe.codegen.step_invariants import count_lengths, once_containers
from fxpipe.ir.builder import node_arg
from fxpipe.ir.graph import Section, batch_mean
from fxpipe.plan.artifact import Bucket
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.ops import Color

Sizes = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides, whose numbers may be expressions of lengths."""


@dataclass(frozen=True, eq=False)
class OnceNodes:
    """``once``: the nodes that compute what a rank computes once a step, with the names of their values.
    ``counts``: those that compute, of each microbatch, what the rank takes the mean of over the batch, with
    the names of the means."""

    once: dict[fx.Node, str]
    counts: dict[fx.Node, str]

    @staticmethod
    def of(sections: Iterable[Section]) -> OnceNodes:
        """Find the nodes of a rank with these sections."""
        inputs = (n.meta.get("input") for s in sections for n in s.graph.find_nodes(op="placeholder"))
        computed = {x.computed: x.name for x in inputs if x is not None and x.computed is not None}
        means = {node: name for node, name in computed.items() if node.target is batch_mean}
        once = {node: name for node, name in computed.items() if node not in means}
        return OnceNodes(once, {node_arg(node, 0): name for node, name in means.items()})

    @property
    def calls(self) -> OnceCalls:
        """The calls of the functions that compute them."""
        once, counts = tuple(once_containers(self.once)), (*once_containers(self.counts),)
        return OnceCalls(
            once if self.once else None, (*counts, *count_lengths(self.counts)) if self.counts else None
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class RankPlan(StepPlan):
    """The input for the source of one rank's program."""

    title: tuple[str, ...]  # the lines that the program begins with
    sections: tuple[Section, ...]  # of the whole pipeline
    nodes: OnceNodes
    tensors: dict[str, torch.Tensor]  # fake tensors of the values that cross between stages
    costs: Costs  # predicted
    buckets: tuple[tuple[Bucket, int], ...] = ()  # over replicas, each with the bytes of its parameters
    compiled: frozenset[Color] = frozenset()  # the sections that Inductor compiles
    sizes: Mapping[str, Sizes] = field(default_factory=dict)  # of values that cross, where they have lengths

    @cached_property
    def own(self) -> tuple[Section, ...]:
        """The sections of this rank."""
        return tuple(s for s in self.sections if self.placement[s.stage] == self.rank)

    def layout(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """The layout of a value that crosses, as a program says it."""
        tensor = self.tensors[name]
        shape, stride = self.sizes.get(name, (tuple(tensor.shape), tuple(tensor.stride())))
        return shape, stride, tensor.dtype
