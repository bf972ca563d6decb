"""The nodes of the running trace, and those that came since another one."""

from __future__ import annotations

import itertools

from torch import fx

from fxpipe.ir.compat import traced_graph


def last_node() -> fx.Node:
    last: fx.Node = next(iter(reversed(traced_graph().nodes)))
    return last


def nodes_after(last: fx.Node | None, graph: fx.Graph | None = None) -> list[fx.Node]:
    """The nodes that were appended after ``last``, in order, to the graph or the running trace."""
    graph = traced_graph() if graph is None else graph
    new = itertools.takewhile(lambda node: node is not last, reversed(graph.nodes))
    return list(new)[::-1]
