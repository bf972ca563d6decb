"""Races: two accesses of a storage, one of which writes, that nothing orders.

The order is that of an execution's graph, found with vector clocks: per node the number of kernels of each
stream, and of messages of each channel, that are over before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from itertools import combinations

import numpy as np

from fxpipe.schedule.lowering.execution import Access, Execution


def races(execution: Execution) -> list[tuple[Access, Access]]:
    """The pairs of accesses that nothing orders, in an execution that ends."""
    clocks = _clocks(execution)
    found: defaultdict[tuple[int, Hashable], list[Access]] = defaultdict(list)
    for access in execution.accesses:
        found[access.rank, access.storage].append(access)

    def is_before(a: Access, b: Access) -> bool:
        return bool((clocks[b.begun] >= clocks[a.over]).all())

    return [
        (a, b)
        for accesses in found.values()
        for a, b in combinations(accesses, 2)
        if (a.writes or b.writes) and not is_before(a, b) and not is_before(b, a)
    ]


def _clocks(execution: Execution) -> list[np.ndarray]:
    """Per node, by stream and channel, the number of what is over when the node is."""
    columns = {key: k for k, key in enumerate({stream for stream, _ in execution.streams.values()})}
    clocks = [np.zeros(len(columns), np.int32)] * len(execution.before)
    for node in execution.order():
        clock = np.zeros(len(columns), np.int32)
        for other in execution.before[node]:
            np.maximum(clock, clocks[other], out=clock)
        if node in execution.streams:
            stream, position = execution.streams[node]
            clock[columns[stream]] = position + 1
        clocks[node] = clock
    return clocks
