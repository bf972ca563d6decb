"""The forward as a chain that can be cut: what each position costs, and what a cut behind it would send."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

from torch import fx

from fxpipe.ir.graph import Free, modules_around, read_buffer, sum_over_ranks
from fxpipe.ir.storage import call_nodes, graph_outputs, is_view, node_bytes, storage_root
from fxpipe.partition.exchanges import exchange_spans

_Amount = TypeVar("_Amount", int, float)


class Crossing(NamedTuple):
    """The values that a cut behind each position would send, and their bytes; ``inf`` where no cut is
    allowed.  The modules that it would divide: none between two layers of the model itself."""

    values: list[float]
    bytes: list[float]
    modules: list[float]


@dataclass(frozen=True)
class Chain:
    """The forward as a chain of ops.  forward, backward: the seconds of each position's op, and of the
    backward ops that differentiate it. buffers: the first and last positions at which the forward reads or
    writes each changed buffer.  inside: bytes as ``crossing`` has them, but for cuts within a rank, which may
    divide an exchange.  exchanges: see ``exchange_spans``."""

    forward: list[float]
    backward: list[float]
    crossing: Crossing
    buffers: dict[str, tuple[int, int]]
    inside: list[float]
    exchanges: dict[tuple[int, int], int]

    @property
    def seconds(self) -> list[float]:
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]

    @cached_property
    def weights(self) -> list[tuple[float, float, float]]:
        """What a cut behind each position weighs: values, bytes, modules."""
        return list(zip(*self.crossing, strict=True))


class CutChain(NamedTuple):
    """A chain, and the positions (ascending) behind which it was cut."""

    chain: Chain
    cuts: tuple[int, ...]


def chain_of(
    graph: fx.Graph,
    position: dict[fx.Node, int],
    by_seq: dict[int, int],
    node_seconds: Callable[[fx.Node], float],
    free: Free,
) -> Chain:
    """Make the chain of a graph's ops without a color.  position: of the forward's nodes.  by_seq: the first
    position of each of autograd's numbers."""
    forward, backward = [0.0] * len(position), [0.0] * len(position)
    home = dict(position)  # forward and backward ops alike: the position whose stage they go with
    accumulated = {node for parts in graph_outputs(graph).grads.values() for node in parts}
    for node in without_color(graph):
        seconds = backward if node.meta["origin"].backward else forward
        if seconds is backward:
            at = by_seq.get(node.meta["origin"].seq)
            if at is None and node not in accumulated:  # a sum that autograd's engine made
                at = min((home[n] for n in node.all_input_nodes if n in home), default=None)
            if at is None:
                continue
            home[node] = at
        seconds[home[node]] += node_seconds(node)
    whole = [*_trained_spans(graph, position, by_seq, free.in_stage), *_head_spans(position)]
    whole += ((at, at + 1) for node, at in position.items() if node in free.of_weights)
    anywhere, exchanges = free.in_stage | free.anywhere, exchange_spans(graph, position, home)
    transfers = inside = crossing(graph, position, home, anywhere, whole)
    if exchanges:
        # What is on its way between lanes stays on its rank.
        whole += ((begin, end + 1) for begin, end in exchanges)
        transfers = crossing(graph, position, home, anywhere, whole)
    return Chain(forward, backward, transfers, _buffer_spans(graph, home), inside.bytes, exchanges)


def without_color(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in call_nodes(graph) if "color" not in n.meta]


def crossing(
    graph: fx.Graph,
    position: dict[fx.Node, int],
    home: dict[fx.Node, int],
    free: Set[fx.Node],
    whole: Iterable[tuple[int, int]] = (),
) -> Crossing:
    """The values that cross each position.  whole: first and last positions between which no cut may be."""
    count, size = [0.0] * (len(position) + 1), [0.0] * (len(position) + 1)
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
            _add(count, position[root], last, 1.0)
            _add(size, position[root], last, node_bytes(root))
    for first, last in (*_buffer_spans(graph, home).values(), *whole):
        _add(barred, first, last, 1)
    closed = list(accumulate(barred))
    last = max((i for node, i in position.items() if node not in free), default=0)
    # Behind a view, a sum over ranks or a free value there is nothing to gain, and the stage in between might
    # be empty; so would be a last stage of free values alone, which each stage that needs them computes for
    # itself.
    shut = [
        closed[i] or i == last or node in free or is_view(node) or node.target is sum_over_ranks
        for node, i in position.items()
    ]

    def where_allowed(amounts: list[float]) -> list[float]:
        return [math.inf if no else amount for no, amount in zip(shut, accumulate(amounts[:-1]), strict=True)]

    return Crossing(where_allowed(count), where_allowed(size), _divided(position))


def _divided(position: Iterable[fx.Node]) -> list[float]:
    """The number of modules around both the op at each position and the next one."""
    origins = [node.meta["origin"] for node in position]
    return [*(float(modules_around(*pair)) for pair in pairwise(origins)), *([0.0] if origins else [])]


def _trained_spans(
    graph: fx.Graph, position: dict[fx.Node, int], by_seq: dict[int, int], of_parameters: Set[fx.Node]
) -> Iterator[tuple[int, int]]:
    """The spans from the first node of each forward op to its node that reads a trained parameter.

    An op on DTensors is several nodes.  Its backward goes with the first: a cut between the two would put the
    parameter on two ranks.  of_parameters: values of parameters alone, which are computed at their uses.
    """
    grads = graph_outputs(graph).grads
    trained = {n for n in graph.find_nodes(op="placeholder") if n.meta["input"].name in grads}
    for node, at in position.items():
        if trained.isdisjoint(node.all_input_nodes):
            continue
        if node in of_parameters:
            trained.add(node)
        else:
            yield by_seq.get(node.meta["origin"].seq, at), at


def _head_spans(position: dict[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """The span from a head in parts to the loss: it runs in the backward of the last stage."""
    first = next((at for node, at in position.items() if "chunk" in node.meta), None)
    if first is not None:
        yield first, len(position) - 1


def _buffer_spans(graph: fx.Graph, home: dict[fx.Node, int]) -> dict[str, tuple[int, int]]:
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
