"""Minimum cuts, as networkx finds them."""

import random
from math import inf

import pytest

from fxpipe.passes.level.max_flow import sink_side


def expected(capacities: dict[tuple[int, int], float], source: int, sink: int) -> set[int] | None:
    """None if the flow is infinite."""
    import networkx as nx  # here: each worker of pytest-xdist would wait for it

    network = nx.DiGraph()
    for (tail, head), capacity in capacities.items():
        network.add_edge(tail, head, **({} if capacity == inf else {"capacity": capacity}))
    try:
        _, (_, far) = nx.minimum_cut(network, source, sink)
    except nx.NetworkXUnbounded:
        return None
    return far


@pytest.mark.parametrize("seed", range(40))
def test_the_fewest_vertices_on_the_sinks_side(seed):
    """Of networks with infinite edges, edges both ways, equal cuts and edges without room."""
    draw = random.Random(seed)
    size = draw.randint(2, 14)
    prices = [0, 1, 1, 2, 3, 10**17 + 1] + [inf] * draw.randint(0, 3)
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    capacities = {pair: draw.choice(prices) for pair in draw.sample(pairs, draw.randint(1, len(pairs)))}
    capacities[0, size - 1] = 1  # both are in the network
    far = expected(capacities, 0, size - 1)
    assert far is None or sink_side(capacities, 0, size - 1) == far
