"""Shared by passes: recomputing a value in another section."""

from __future__ import annotations

from collections.abc import Set

from torch import fx

from fxpipe.ir.compat import copy_node
from fxpipe.schedule.ops import Color, Phase


def clone_into(
    node: fx.Node,
    color: Color,
    before: fx.Node,
    clones: dict[tuple[Color, fx.Node], fx.Node],
    repeated: Set[fx.Node],
    in_b: Set[fx.Node] = frozenset(),
) -> fx.Node:
    """Recompute ``node`` in ``color``, together with those of its inputs that are in ``repeated``.

    Other inputs are used as they are.  Nodes ``in_b`` are recomputed in the stage's B, for W as well.
    ``clones`` holds earlier clones; calls that share it must come in the order of ``before``.
    """
    if node not in repeated or node.meta["color"] == color:
        return node
    if node in in_b:
        color = Color(color.stage, Phase.B)
    known = clones.get((color, node))
    if known is not None:
        return known
    inputs = {n: clone_into(n, color, before, clones, repeated, in_b) for n in node.all_input_nodes}
    with node.graph.inserting_before(before):
        clone = copy_node(node.graph, node, inputs.__getitem__)
    clone.meta["color"] = color
    clones[(color, node)] = clone
    return clone
