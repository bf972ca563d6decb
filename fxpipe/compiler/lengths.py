"""The sizes of what crosses between ranks, in programs that take microbatches of many lengths."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import fx

from fxpipe.codegen.rank_plan import Sizes
from fxpipe.errors import SizeError
from fxpipe.ir.graph import Origin
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.size import sized
from fxpipe.ir.storage import call_nodes


def crossing_sizes(graph: fx.Graph, names: Collection[str], traces: ResizedTraces) -> dict[str, Sizes]:
    """Shape and strides of the values with these names, whose numbers may be expressions.

    Raises SizeError where one is none, naming the op.
    """
    try:
        values = traces.with_values_of(graph).resized_values
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # of torch, for an op on other lengths
        raise SizeError(f"a rewrite of the step fits the example's lengths alone: {error}") from error
    return {
        node.name: _sizes(node, values[node.meta["val"]], traces)
        for node in call_nodes(graph)
        if node.name in names
    }


def _sizes(node: fx.Node, like: Sequence[torch.Tensor], traces: ResizedTraces) -> Sizes:
    first = like[0]
    order = sorted(range(first.dim()), key=lambda d: (first.stride(d), first.shape[d] == 1))
    strides: list[list[int]] = []
    for tensor in like:
        # As its elements lie without gaps, in the example's order.
        strides.append([0] * first.dim())
        for k, d in enumerate(order):
            strides[-1][d] = math.prod(tensor.shape[each] for each in order[:k])
    if [*first.stride()] != strides[0]:
        strides = [[*tensor.stride()] for tensor in like]

    def numbers(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
        named = [
            sized([int(x) for x in column], traces.names, traces.points) for column in zip(*rows, strict=True)
        ]
        if None in named:
            origin = node.meta.get("origin", Origin())
            raise SizeError(
                f"a message has a size that is no polynomial of {', '.join(traces.names)}: {node.name}, of "
                f"{origin.module} ({origin.source})"
            )
        return tuple(each for each in named if each is not None)

    return numbers([tensor.shape for tensor in like]), numbers(strides)
