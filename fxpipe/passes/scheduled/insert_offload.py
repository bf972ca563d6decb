"""Inserts nodes that offload saved activations after F and reload them before B or W.

before: gelu (F) ──► gelu_backward (B);   view (F) ──► addmm_ (W)
after:  gelu (F) ──► offload (F) ──► reload (B) ──► gelu_backward (B)
        relu (F) ──► offload (F) ──► reload (W) ──► view (W) ──► addmm_ (W)

A storage is offloaded once, however many views of it were saved: the views are recomputed from the reloaded
storage.  A storage that both gradients need is reloaded in B, which hands it on.  The schedule decides the
microbatches and times of transfers: without a transfer the two nodes change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from fxpipe.ir.graph import offload, reload
from fxpipe.ir.nodes import copy_node
from fxpipe.ir.storage import call_nodes, root_within
from fxpipe.schedule.ops import Color, Phase


def insert_offload(graph: fx.Graph, stage: int, user: Phase, roots: Iterable[fx.Node]) -> None:
    """Insert ``offload`` after each of these values of a stage's F, and ``reload`` before their first
    ``user``.

    user: B, or W for values that B does not need.
    """
    behind = (Color(stage, Phase.B), Color(stage, Phase.W))
    users: dict[fx.Node, dict[fx.Node, None]] = {root: {} for root in roots}  # in the graph's order
    for node in call_nodes(graph):
        if node.meta["color"] in behind:
            for value in node.all_input_nodes:
                root = _saved_root(value, stage)
                if root in users:
                    users[root][node] = None
    for root, readers in users.items():
        _insert(graph, stage, user, root, list(readers))


def _insert(graph: fx.Graph, stage: int, user: Phase, root: fx.Node, users: list[fx.Node]) -> None:
    with graph.inserting_after(root):
        offloaded = graph.create_node("call_function", offload, (root,), name=f"{root.name}_offloaded")
    offloaded.meta = {**root.meta, "color": Color(stage, Phase.F)}
    with graph.inserting_before(users[0]):
        reloaded = graph.create_node("call_function", reload, (offloaded,), name=f"{root.name}_reloaded")
    reloaded.meta = {**root.meta, "color": Color(stage, user)}
    again: dict[tuple[fx.Node, Color], fx.Node] = {}
    views: set[fx.Node] = set()
    for node in users:
        for value in node.all_input_nodes:
            if _saved_root(value, stage) is root:
                node.replace_input_with(value, _view(value, root, reloaded, node, again))
                views.add(value)
    for view in views - {root}:
        while not view.users and view is not root:
            view, dead = view.all_input_nodes[0], view
            graph.erase_node(dead)


def _saved_root(node: fx.Node, stage: int) -> fx.Node:
    """The value that a view made by F is of; any other value itself."""
    if node.op != "call_function" or node.target in (offload, reload):
        return node
    color = node.meta["color"]
    return root_within(node, stage) if color.stage == stage and color.phase is Phase.F else node


def _view(
    value: fx.Node,
    root: fx.Node,
    reloaded: fx.Node,
    user: fx.Node,
    again: dict[tuple[fx.Node, Color], fx.Node],
) -> fx.Node:
    """A copy of a view, of the reloaded value, in the section of its user."""
    if value is root:
        return reloaded
    color = user.meta["color"]
    earlier = again.get((value, color))
    if earlier is not None:
        return earlier
    source = _view(value.all_input_nodes[0], root, reloaded, user, again)
    with value.graph.inserting_before(user):
        view = copy_node(value.graph, value, lambda _: source)
    view.meta["color"] = color
    again[value, color] = view
    return view
