"""The values that cross a cut of the forward after each of its ops, and the modules that it lies in."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import eq
from typing import TypeVar

from torch import fx

from fxpipe.ir.graph import read_buffer, sum_over_ranks
from fxpipe.ir.storage import graph_outputs, is_view, node_bytes, storage_root

_Amount = TypeVar("_Amount", int, float)


@dataclass(frozen=True)
class Crossing:
    """Of a cut after each position: the bytes that it would send forward, ``inf`` where no cut is allowed,
    and the number of values."""

    bytes: list[float]
    values: list[int]


def crossing_values(
    graph: fx.Graph, position: dict[fx.Node, int], home: dict[fx.Node, int], free: Set[fx.Node]
) -> Crossing:
    """position: of the forward ops.  home: of all ops, the position whose stage they go with.  free: the ops
    whose values every stage computes for itself."""
    steps = [0.0] * (len(position) + 1)
    counts = [0] * (len(position) + 1)
    barred = [0] * (len(position) + 1)
    last_use: dict[fx.Node, int] = {}
    for node, at in position.items():
        uses = [home[u] for u in node.users if u in home]
        if isinstance(node.meta.get("val"), (tuple, list)):
            _add(barred, at, max([*uses, at]), 1)
        elif node not in free:
            root = storage_root(node)
            last_use[root] = max([last_use.get(root, at), *uses])
    for root, last in last_use.items():
        if root in position:
            _add(steps, position[root], last, node_bytes(root))
            _add(counts, position[root], last, 1)
    for first, last in buffer_spans(graph, home).values():
        _add(barred, first, last, 1)
    crossing, closed = list(accumulate(steps)), list(accumulate(barred))
    last = max((i for node, i in position.items() if node not in free), default=0)
    # Behind a view, a sum over ranks or a free value there is nothing to gain, and the stage in between might
    # be empty; so would be a last stage of free values alone, which each stage that needs them computes for
    # itself.
    bytes = [
        math.inf
        if closed[i] or i == last or node in free or is_view(node) or node.target is sum_over_ranks
        else crossing[i]
        for node, i in position.items()
    ]
    return Crossing(bytes, list(accumulate(counts[:-1])))


def nesting(forward: Sequence[fx.Node], free: Set[fx.Node]) -> list[int]:
    """Of a cut after each position, how many modules it lies in: those of both the op before it and the next
    one that is not free."""
    found, behind = [0] * len(forward), list[str]()
    for i in reversed(range(len(forward))):
        path = [name for name in forward[i].meta["origin"].path.split(".") if name]
        found[i] = sum(takewhile(bool, map(eq, path, behind)))
        if forward[i] not in free:
            behind = path
    return found


def buffer_spans(graph: fx.Graph, home: dict[fx.Node, int]) -> dict[str, tuple[int, int]]:
    """The first and last positions at which the forward reads or writes each changed buffer."""
    spans = {}
    reads = {
        n.args[0].meta["input"].name: n for n in graph.find_nodes(op="call_function", target=read_buffer)
    }
    for name, value in graph_outputs(graph).buffers.items():
        touched = [home[n] for n in (reads.get(name), value) if n in home]
        if touched:
            spans[name] = (min(touched), max(touched))
    return spans


def _add(steps: list[_Amount], first: int, last: int, amount: _Amount) -> None:
    """Add ``amount`` to every cut between positions ``first`` and ``last``."""
    if last > first:
        steps[first] += amount
        steps[last] -= amount
