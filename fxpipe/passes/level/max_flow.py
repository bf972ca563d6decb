"""Minimum cuts of networks by Dinic's algorithm: flow is sent along shortest paths until none is left.

E. A. Dinic, Algorithm for solution of a problem of maximum flow in networks with power estimation, 1970.
networkx has minimum cuts as well, but to import it takes a tenth of the time of a compilation.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import pairwise

Vertex = Hashable
Edges = dict[Vertex, dict[Vertex, float]]
"""tail -> head -> what still fits through the edge."""


def sink_side(capacities: Mapping[tuple[Vertex, Vertex], float], source: Vertex, sink: Vertex) -> set[Vertex]:
    """The vertices on the sink's side of a minimum cut; where there are several such cuts, the fewest.

    capacities: of the edges (tail, head), integers, or infinite, of which no path may consist.
    """
    left: Edges = {}
    for (tail, head), capacity in capacities.items():
        left.setdefault(tail, {})[head] = capacity + left.get(tail, {}).get(head, 0)
        # The way back, by which a later path can take flow from an edge again.
        left.setdefault(head, {}).setdefault(tail, 0)
    while True:
        distances = _distances(left, sink)
        if source not in distances:
            # Nothing more flows: what can still reach the sink is on its side of the cut.
            return set(distances)
        _fill_shortest_paths(left, distances, source, sink)


def _distances(left: Edges, sink: Vertex) -> dict[Vertex, int]:
    """The edges between a vertex and the sink, of all vertices from which something can flow there."""
    distances, reached = {sink: 0}, [sink]
    for head in reached:
        for tail in left[head]:
            if tail not in distances and left[tail][head]:
                distances[tail] = distances[head] + 1
                reached.append(tail)
    return distances


def _fill_shortest_paths(left: Edges, distances: Mapping[Vertex, int], source: Vertex, sink: Vertex) -> None:
    """Send flow until no path of the present shortest length has room."""
    nearer: dict[Vertex, list[Vertex]] = {}  # of the vertices that a path has reached
    path = [source]
    while path:
        at = path[-1]
        if at not in nearer:
            # Made once for each vertex and length: edges that turn out full are dropped for good.
            nearer[at] = [head for head in left[at] if distances.get(head) == distances[at] - 1]
        heads = nearer[at]
        if at == sink:
            _send(left, path)
        elif heads and left[at][heads[-1]]:
            path.append(heads[-1])
        elif heads:
            heads.pop()
        else:
            path.pop()
            if path:
                nearer[path[-1]].pop()


def _send(left: Edges, path: list[Vertex]) -> None:
    """Send what fits, and go back to where an edge is now full."""
    edges = list(pairwise(path))
    amount = min(left[tail][head] for tail, head in edges)
    for tail, head in edges:
        left[tail][head] -= amount
        left[head][tail] += amount
    full = next(k for k, (tail, head) in enumerate(edges) if not left[tail][head])
    del path[full + 1 :]
