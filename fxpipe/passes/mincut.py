"""Chooses the values to save and to recompute for a later section, by a minimum cut.

Every value is either saved, which costs its bytes, or recomputed from its inputs, which costs the bytes that
its op moves.  The cheapest choice is a minimum cut of the values that lead to those that the section needs;
the flow runs from their users back to the values that must be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import fx

from fxpipe.schedule.engine.compiled import compiled

Price = Callable[[fx.Node], int | None]
"""The cost of a choice: an integer, so that sums are exact, or None if the choice is forbidden."""


def to_repeat(needed: Iterable[fx.Node], keep: Price, repeat: Price) -> set[fx.Node]:
    """The ops to recompute; the values of the others are saved if the recomputed ops need them.

    keep, repeat: the costs of saving an op's value, and of recomputing it.  At least one of the two must be
    allowed.  Placeholders are free.
    """
    nodes: dict[fx.Node, int] = {}
    tails, heads, prices = list[int](), list[int](), list[int | None]()
    todo = [node for node in needed if node.op == "call_function"]

    def edge(tail: int, head: int, price: int | None) -> None:
        tails.append(tail)
        heads.append(head)
        prices.append(price)

    source, sink = 0, 1
    for node in dict.fromkeys(todo):
        edge(source, _entry(nodes, node), None)
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        entry = _entry(nodes, node)
        edge(entry, entry + 1, keep(node))
        again = repeat(node)
        if again != 0:
            edge(entry + 1, sink, again)
        if again is not None:
            for n in node.all_input_nodes:
                if n.op == "call_function":
                    edge(entry + 1, _entry(nodes, n), None)
                    todo.append(n)
    if not seen:
        return set()
    most = 1 + sum(price for price in prices if price is not None)
    room = np.zeros(2 * len(tails), np.int64)
    room[::2] = [most if price is None else price for price in prices]
    ends = np.empty(2 * len(tails), np.int64)
    ends[::2], ends[1::2] = heads, tails
    near = users_side(2 + 2 * len(nodes), ends, room, source, sink)
    return {node for node in nodes if near[_entry(nodes, node) + 1]}


def _entry(nodes: dict[fx.Node, int], node: fx.Node) -> int:
    """The vertex at which the flow enters a node; it leaves from the next vertex."""
    return 2 + 2 * nodes.setdefault(node, len(nodes))


@compiled
def users_side(count: int, ends: Any, room: Any, source: int, sink: int) -> Any:
    """Per vertex whether it is on the source's side of a minimum cut; the largest such side (Dinic's
    algorithm).

    Edge e goes from ends[e ^ 1] to ends[e]; room[e] is its capacity before, and its residual capacity after.
    """
    first, following = np.full(count, -1), np.empty(len(ends), np.int64)
    for e in range(len(ends)):
        tail = ends[e ^ 1]
        following[e] = first[tail]
        first[tail] = e
    level, at = np.empty(count, np.int64), np.empty(count, np.int64)  # steps to the sink; next edge to try
    queue, path = np.empty(count, np.int64), np.empty(count, np.int64)
    while True:
        level[:] = -1
        level[sink] = 0
        queue[0], head, tail = sink, 0, 1
        while head < tail:
            vertex = queue[head]
            head += 1
            e = first[vertex]
            while e >= 0:
                other = ends[e]
                if level[other] < 0 and room[e ^ 1] > 0:
                    level[other] = level[vertex] + 1
                    queue[tail] = other
                    tail += 1
                e = following[e]
        if level[source] < 0:
            return level < 0
        for vertex in range(count):
            at[vertex] = first[vertex]
        vertex, length = source, 0
        while True:
            if vertex == sink:
                least = path[0]
                for k in range(length):
                    if room[path[k]] < room[least]:
                        least = path[k]
                flow, stop = room[least], length
                for k in range(length - 1, -1, -1):
                    room[path[k]] -= flow
                    room[path[k] ^ 1] += flow
                    if room[path[k]] == 0:
                        stop = k
                vertex, length = ends[path[stop] ^ 1], stop
                continue
            e = at[vertex]
            while e >= 0 and not (room[e] > 0 and level[ends[e]] == level[vertex] - 1):
                e = following[e]
            at[vertex] = e
            if e >= 0:
                path[length] = e
                length += 1
                vertex = ends[e]
            elif length:
                level[vertex] = -1  # a dead end
                length -= 1
                vertex = ends[path[length] ^ 1]
            else:
                break
