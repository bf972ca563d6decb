"""The gradient of the loss in a captured step, which is 1 / microbatches, and the share of a replica in sums
over the batch, for numbers that are chosen later.

before: full([], 4.656612875245797e-10)
after:  full([], 0.0625)
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from fxpipe.ir.size import Share

#: So many no step has; the quotient with one stands for the number that is chosen later.
LATER = 2**31 - 1
REPLICAS_LATER = 2**31 - 2


def choose_numbers(graphs: Iterable[fx.Graph], microbatches: int, replicas: int) -> None:
    """Give the graphs of a step that was captured for LATER microbatches their numbers, in place."""

    def chosen(value: object) -> object:
        if value == 1 / REPLICAS_LATER:
            return 1 / replicas
        if value != 1 / LATER:
            return value
        return Share(1 / microbatches) if isinstance(value, Share) else 1 / microbatches

    for graph in graphs:
        for node in graph.nodes:
            if node.op == "call_function":
                node.args = tuple(map(chosen, node.args))
