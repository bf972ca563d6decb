"""Chooses the values to save and to recompute for a later section, by a minimum cut.

Every value is either saved, which costs its bytes, or recomputed from its inputs, which costs the bytes that
its op moves.  The cheapest choice is a minimum cut of the values that lead to those that the section needs;
the flow runs from their users back to the values that must be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import inf

from torch import fx

from fxpipe.ir.storage import is_view, node_bytes
from fxpipe.passes.level.max_flow import sink_side

Price = Callable[[fx.Node], int | None]
"""The cost of a choice: an integer, so that sums are exact, or None if the choice is forbidden."""

ENTRY, EXIT = 0, 1
"""The vertices at which the flow enters and leaves a node."""


def to_repeat(needed: Iterable[fx.Node], keep: Price, repeat: Price) -> set[fx.Node]:
    """The ops to recompute; the values of the others are saved if the recomputed ops need them.

    keep, repeat: the costs of saving an op's value, and of recomputing it.  At least one of the two must be
    allowed.  Placeholders are free.
    """
    capacities: dict[tuple[object, object], float] = {}
    source, sink = object(), object()
    todo = [node for node in needed if node.op == "call_function"]

    def edge(tail: object, head: object, price: int | None) -> None:
        capacities[tail, head] = inf if price is None else price

    for node in todo:
        # It is needed, so the cut must come behind it: its value is saved, or what it is recomputed from.
        edge(source, (node, ENTRY), None)
    seen, able = set[fx.Node](), set[fx.Node]()  # able: those that may be repeated
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        again = repeat(node)
        if again is None:
            # It cannot be repeated, so it can only be saved.
            edge((node, ENTRY), sink, keep(node))
            continue
        able.add(node)
        edge((node, ENTRY), (node, EXIT), keep(node))
        # A free repetition has no edge: nothing is gained by not repeating it.
        if again:
            edge((node, EXIT), sink, again)
        for n in node.all_input_nodes:
            if n.op == "call_function":
                edge((node, EXIT), (n, ENTRY), None)
                todo.append(n)
    # Without an edge to the sink nothing has a price.
    if not able or not any(head is sink for _, head in capacities):
        return able
    far = sink_side(capacities, source, sink)
    return {node for node in able if (node, EXIT) not in far}


def to_repeat_for(users: Sequence[fx.Node], may: Callable[[fx.Node], bool], keep: Price) -> set[fx.Node]:
    """The ops to repeat for what these ops take from others; ``may`` says which can be repeated: a view for
    nothing, another op for the bytes that it moves."""
    size, inside = cache(node_bytes), {*users}

    def repeat(node: fx.Node) -> int | None:
        if not may(node):
            return None
        return 0 if is_view(node) else size(node) + sum(map(size, node.all_input_nodes))

    return to_repeat([n for user in users for n in user.all_input_nodes if n not in inside], keep, repeat)
