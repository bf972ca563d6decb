"""Computes once what a section computes several times, as each layer does with a mask or a rotary table.

needs:  W split off, cheap values sunk: then no section needs more values of others than before
before: a = unsqueeze(cos, 1)   (layer 0)      b = unsqueeze(cos, 1)   (layer 1)
after:  a                                      a

Random ops, checks, reads of buffers and results of the step are never merged.  Two values that are equal at
the example's sizes alone stay apart, since costs at other sizes would be wrong.
"""

from __future__ import annotations

from collections.abc import Hashable, Set
from typing import Any

from torch import fx

from fxpipe.ir.graph import read_buffer
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.storage import call_nodes, may_draw_numbers, tensors, written
from fxpipe.plan.tensors import sum_over_ranks
from fxpipe.runtime.program.checks import expect
from fxpipe.runtime.program.random import keyed
from fxpipe.schedule.ops import Color

_EACH_ITS_OWN = (keyed, expect, read_buffer, sum_over_ranks)


def merge_equal(
    graph: fx.Graph, sections: Set[Color] | None = None, resized: ResizedTraces | None = None
) -> None:
    """sections: where to merge, by default everywhere.  resized: the traces at other sizes."""
    first: dict[Hashable, fx.Node] = {}
    for node in call_nodes(graph):
        if (sections is not None and node.meta["color"] not in sections) or not _may_merge(node):
            continue
        equal = first.setdefault(_value(node, resized), node)
        if equal is not node:
            node.replace_all_uses_with(equal)
            graph.erase_node(node)


def _may_merge(node: fx.Node) -> bool:
    is_own = node.target in _EACH_ITS_OWN or may_draw_numbers(node.target) or bool(written(node.target))
    return not is_own and not any(user.op == "output" for user in node.users)


def _value(node: fx.Node, resized: ResizedTraces | None) -> Hashable:
    """The same for ops of one section that are the same, with the same arguments: as text, in which 0.0, -0.0
    and False differ."""
    sizes: list[Any] = []
    if resized is not None:
        sizes = [other.shape for t in tensors(node) for other in resized.resized_values.get(t, ())]
    return node.target, repr(node.args), repr(node.kwargs), node.meta["color"], tuple(sizes)
