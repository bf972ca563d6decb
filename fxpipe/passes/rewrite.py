"""The recomputation of values in other sections, which several passes share."""

from __future__ import annotations

import operator
from collections.abc import Collection, Container, Sequence, Set

from torch import fx

from fxpipe.ir.builder import node_arg
from fxpipe.ir.nodes import copy_node
from fxpipe.ir.storage import call_nodes, node_bytes, storage_root
from fxpipe.schedule.ops import Color, Phase


def by_stage(graph: fx.Graph, phases: Container[Phase]) -> dict[int, list[fx.Node]]:
    """The ops of these phases of each stage, in the order of the graph."""
    stages: dict[int, list[fx.Node]] = {}
    for node in call_nodes(graph):
        if node.meta["color"].phase in phases:
            stages.setdefault(node.meta["color"].stage, []).append(node)
    return stages


def kept_bytes(graph: fx.Graph) -> int:
    """The bytes of the forward's values that B or W of the same stage reads."""
    kept = set[fx.Node]()
    for stage, users in by_stage(graph, (Phase.B, Phase.W)).items():
        roots = {storage_root(node) for user in users for node in user.all_input_nodes}
        kept |= {root for root in roots if root.meta.get("color") == Color(stage, Phase.F)}
    return sum(map(node_bytes, kept))


def repeat_for(
    users: Sequence[fx.Node], repeated: Set[fx.Node], in_b: Set[fx.Node] = frozenset()
) -> Collection[fx.Node]:
    """Let these ops read clones in their own sections of what is ``repeated``; see ``clone_into``.

    users: in the order of the graph.  Returns the clones.
    """
    clones: dict[tuple[Color, fx.Node], fx.Node] = {}
    for user in users:
        for node in user.all_input_nodes:
            if node in repeated:
                clone = clone_into(node, user.meta["color"], user, clones, repeated, in_b)
                user.replace_input_with(node, clone)
    return clones.values()


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

    def place(node: fx.Node, color: Color) -> Color:
        computes = node_arg(node, 0) if node.target is operator.getitem else node  # tuples are in one section
        return Color(color.stage, Phase.B) if computes in in_b else color

    def available(node: fx.Node, color: Color) -> fx.Node | None:
        is_there = node not in repeated or node.meta["color"] == color
        return node if is_there else clones.get((place(node, color), node))

    todo = [(node, color)]  # no recursion: the ways of a deep model are long
    while todo:
        one, wanted = todo[-1]
        home = place(one, wanted)
        if available(one, wanted) is not None:
            todo.pop()
        elif missing := [(n, home) for n in one.all_input_nodes if available(n, home) is None]:
            todo += reversed(missing)
        else:
            inputs = {n: available(n, home) for n in one.all_input_nodes}
            behind = inputs[node_arg(one, 0)] if one.target is operator.getitem else None  # its tuple
            with one.graph.inserting_before(before if behind is None else behind.next):
                # d_x_1 would be the gradient of x_1.
                name = f"{one.name}_again" if "gradient" in one.meta else one.name
                clone = copy_node(one.graph, one, inputs.__getitem__, name)
            clone.meta["color"] = home
            clones[(home, one)] = clone
    result = available(node, color)
    assert result is not None, "it was cloned"
    return result
