"""Moves cuts to where fewer values cross, as far as the step of a schedule takes no longer by it.

A cut inside an attention or an MLP also sends the value that goes around it.  A cut moves to a place that
fewer values cross, or as many of fewer bytes, or as many bytes between ops of fewer common modules: where the
stage that grows delays no other one, or where the message saves more time than the stage takes.  The schedule
is run on estimated costs; what is found here is cut, costed and simulated before it is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from fxpipe.cost.devices.cluster import Cluster
from fxpipe.partition.chain import CutChain
from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.costs import Costs, Edge
from fxpipe.schedule.ops import RankOps
from fxpipe.schedule.problem import Problem

Cuts = tuple[int, ...]


@dataclass(frozen=True)
class LighterCuts:
    """The search for lighter cuts.  problem: with the costs of the stages that ``cut_chain`` gave, the first
    of which is stage ``first``. ops: of its schedule."""

    cut_chain: CutChain
    first: int
    problem: Problem
    ops: RankOps
    cluster: Cluster

    def moved(self) -> Cuts | None:
        """Other cuts; None if none can be moved."""
        order = self.problem.order(self.ops)

        def seconds(costs: Costs, enough: float = inf) -> float:
            """The seconds of the schedule without transfers; ``inf`` where it is above ``enough``."""
            problem = replace(self.problem, costs=costs)
            bound = lower_bound(costs, problem.placement, problem.microbatches)
            return inf if bound > enough else problem.time_of(order)

        cuts, least = self.cut_chain.cuts, None
        while True:
            for tried in self._lighter(cuts):
                # Only if there is a cut to compare with: many models have none.
                least = seconds(self.problem.costs) if least is None else least
                # Above this bound the run can be left out.
                now = seconds(self._estimated(tried), least)
                if now <= least:
                    cuts, least = tried, now
                    break
            else:
                return cuts if cuts != self.cut_chain.cuts else None

    def _lighter(self, cuts: Cuts) -> Iterator[Cuts]:
        """One cut moved, to the nearest places on both sides for each lower weight, the lightest first."""
        weights = self.cut_chain.chain.weights
        for which, here in enumerate(cuts):
            # A stage keeps at least one position.
            begin = cuts[which - 1] + 1 if which else 0
            end = cuts[which + 1] if which + 1 < len(cuts) else len(weights) - 1
            left = _ever_lighter(weights, range(here, begin - 1, -1))
            right = _ever_lighter(weights, range(here, end))
            for place in sorted([*left, *right], key=lambda place: (weights[place], abs(place - here))):
                yield (*cuts[:which], place, *cuts[which + 1 :])

    def _estimated(self, cuts: Cuts) -> Costs:
        """The costs if the chain is cut there instead: the times of a stage follow from those of its
        positions, a message from the bytes that cross."""
        chain, before, costs = self.cut_chain.chain, self.cut_chain.cuts, self.problem.costs
        stages = list(costs.stages)
        growths = (_growth(seconds, before, cuts) for seconds in (chain.forward, chain.backward))
        for stage, (f, b) in enumerate(zip(*growths, strict=True), self.first):
            cost = stages[stage]
            stages[stage] = replace(
                cost, forward=f * cost.forward, backward=b * cost.backward, weight=b * cost.weight
            )
        bytes = chain.crossing.bytes
        pairs = enumerate(zip(before, cuts, strict=True), self.first)
        growth = {stage: bytes[new] / bytes[old] for stage, (old, new) in pairs if bytes[old]}
        return replace(
            costs, stages=tuple(stages), edges=tuple(self._grown(edge, growth) for edge in costs.edges)
        )

    def _grown(self, edge: Edge, growth: Mapping[int, float]) -> Edge:
        """The edge with the bytes that cross now.  growth: that of the message behind each stage.  One that
        skips stages stays as it is."""
        source, target = edge.source.stage, edge.target.stage
        behind = min(source, target)
        # What it carries does not depend on one cut alone.
        if abs(source - target) != 1 or behind not in growth:
            return edge
        moved, ranks = edge.bytes * growth[behind], self.problem.placement
        within, between = self.cluster.message_seconds(moved, ranks[source], ranks[target])
        return replace(edge, bytes=moved, seconds=within, inter_seconds=between)


def _ever_lighter(weights: Sequence[tuple[float, ...]], places: Sequence[int]) -> Iterator[int]:
    """The places that weigh less than all before them."""
    lightest = weights[places[0]]
    for place in places:
        if weights[place] < lightest:
            lightest = weights[place]
            yield place


def _growth(seconds: Sequence[float], before: Cuts, after: Cuts) -> list[float]:
    """The seconds of each stage's positions, relative to those with the cuts ``before``."""
    old, new = (np.add.reduceat(seconds, [0, *(cut + 1 for cut in cuts)]) for cuts in (before, after))
    return [float(n / o) if o else 1.0 for o, n in zip(old, new, strict=True)]
