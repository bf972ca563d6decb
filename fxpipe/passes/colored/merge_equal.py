"""Computes once what a section computes several times, as each layer does with a mask of padding.

needs:  W split off, cheap values sunk: then no section needs more values of others than before
before: a = eq(ids, 0)   (layer 0)      b = eq(ids, 0)   (layer 1)
after:  a                               a

What layers share stands before the first of them, so that they stay alike.
Random ops, checks, reads of buffers and ops of which the step returns a result are never merged.  Two values
that are equal at the example's sizes alone stay apart, since costs at other sizes would be wrong.  A divided
exchange between lanes is merged as a whole, with its begin: no begin has two ends.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Set

from torch import fx

from fxpipe.ir.builder import node_arg
from fxpipe.ir.graph import modules_on, read_buffer
from fxpipe.ir.ops import BEGIN_EXCHANGES, ENDS_EXCHANGE
from fxpipe.ir.resized import ResizedTraces, value_key
from fxpipe.ir.storage import call_nodes, leading_to, may_draw_numbers, written
from fxpipe.plan.tensors import sum_over_ranks
from fxpipe.runtime.program.checks import expect
from fxpipe.runtime.program.random import keyed
from fxpipe.schedule.ops import Color

_EACH_ITS_OWN = (keyed, expect, read_buffer, *BEGIN_EXCHANGES)


def merge_equal(
    graph: fx.Graph,
    sections: Set[Color] | None = None,
    resized: ResizedTraces | None = None,
    which: Callable[[fx.Node], bool] = lambda node: True,
) -> None:
    """Merge equal ops.  sections: where to merge, by default everywhere.  resized: the traces at other sizes.
    which: of the ops to merge."""
    first: dict[Hashable, fx.Node] = {}
    paths: dict[fx.Node, list[str]] = {}  # of the modules that share a value
    for node in call_nodes(graph):
        if sections is not None and node.meta["color"] not in sections:
            continue
        # Two draws of random numbers are equal ops with other results.
        if not which(node) or not _may_merge(node):
            continue
        # The parts of a sum of all ranks are sent to the stage that uses it: none is a part of two such sums.
        sums = tuple(user.meta["color"] for user in node.users if user.target is sum_over_ranks)
        # Per section: over two of them, a value would have to be sent or saved.
        begin = node_arg(node, 0) if node.target is ENDS_EXCHANGE else None
        made = node if begin is None else begin
        colors = node.meta["color"], made.meta["color"]
        key = colors, node.target, sums, value_key(made, made.args, made.kwargs, resized)
        equal = first.setdefault(key, node)
        if equal is not node:
            paths.setdefault(equal, [equal.meta["origin"].path]).append(node.meta["origin"].path)
            node.replace_all_uses_with(equal)
            graph.erase_node(node)
            if begin is not None:
                graph.erase_node(begin)
    # Else the first layer alone would compute it, and would have other ops than the next ones.
    _before_their_layers(graph, paths)


def _before_their_layers(graph: fx.Graph, paths: dict[fx.Node, list[str]]) -> None:
    """Move values that several modules share, and what leads to them, before the first of these modules."""
    shared: defaultdict[tuple[Color, str], list[fx.Node]] = defaultdict(list)
    for node, modules in paths.items():
        if len(set(modules)) > 1:
            shared[node.meta["color"], _first_layer(modules)].append(node)
    colors = {color for color, _ in shared}
    inside: defaultdict[tuple[Color, str], list[fx.Node]] = defaultdict(list)
    for node in call_nodes(graph):
        if node.meta["color"] in colors:
            for module in modules_on(node.meta["origin"].path):
                inside[node.meta["color"], module].append(node)
    for layer, values in shared.items():
        moved = leading_to(values)
        begin = next((node for node in inside[layer] if node not in moved), None)
        if begin is not None:
            for node in sorted(n for n in moved if n.op == "call_function" and begin < n):
                begin.prepend(node)


def _first_layer(paths: list[str]) -> str:
    """The module of the first path that the others are not in: ``h.0`` of ``h.0.attn`` and ``h.1.attn``."""
    for module in modules_on(paths[0]):
        if not all(path == module or path.startswith(f"{module}.") for path in paths):
            return module
    return paths[0]


def _may_merge(node: fx.Node) -> bool:
    is_own = node.target in _EACH_ITS_OWN or may_draw_numbers(node.target) or bool(written(node.target))
    parts = [user for user in node.users if user.target is operator.getitem]
    return not is_own and not any(user.op == "output" for each in (node, *parts) for user in each.users)
