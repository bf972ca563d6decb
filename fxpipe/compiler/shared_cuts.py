"""What all cuts of one step have in common, found for the first of them."""

from __future__ import annotations

from collections.abc import Set

from torch import fx

from fxpipe.cost.nodes import NodeSeconds
from fxpipe.cost.recomputable import recomputable_nodes
from fxpipe.ir.graph import Free
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.step_invariants import mean_values, once_values
from fxpipe.partition.chain import Chain


class Uncut:
    """By the names of nodes: each cut is of a copy of the same graph.

    chain: the forward, where a cut by its costs has been found.
    """

    def __init__(self) -> None:
        self.chain: Chain | None = None
        self._names: tuple[frozenset[str], ...] = ()

    def free(
        self, graph: fx.Graph, resized: ResizedTraces | None, seconds: NodeSeconds
    ) -> tuple[set[fx.Node], Free]:
        """The nodes of a copy that are computed once a step, and those that are free."""
        if not self._names:
            once_of, free = once_values(graph, resized), recomputable_nodes(graph, seconds)
            self._names = (
                _names(once_of.keys() | mean_values(graph)),
                _names(free.anywhere),
                _names(free.in_stage),
            )
        once, anywhere, in_stage = ({n for n in graph.nodes if n.name in names} for names in self._names)
        return once, Free(anywhere, in_stage)


def _names(nodes: Set[fx.Node]) -> frozenset[str]:
    return frozenset(node.name for node in nodes)
