"""The nodes of the running trace, and those that came since another one."""

from __future__ import annotations

from torch import fx

from fxpipe.ir.compat import traced_graph


def last_node() -> fx.Node:
    last: fx.Node = next(iter(reversed(traced_graph().nodes)))
    return last


def nodes_after(last: fx.Node | None, graph: fx.Graph | None = None) -> list[fx.Node]:
    """The nodes that were appended after ``last``, in order, to the graph or the running trace."""
    new = []
    for node in reversed((traced_graph() if graph is None else graph).nodes):
        if node is last:
            break
        new.append(node)
    return new[::-1]
