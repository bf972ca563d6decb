"""Leaves out views that the passes after ``simplify`` made superfluous, within each section.

before: view(view(d, [2, 5, 8]), [10, 8])       d, of [10, 8], is kept for W, which repeats the views of it
after:  d

The rules are those of ``simplify``; equal views of a section become one.  What a section gives and takes
stays, or becomes less: a rule holds where the view's users, and what they get instead, are in its section.
As views cost nothing, costs stay.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fxpipe.ir.storage import call_nodes, is_view
from fxpipe.passes.captured.identities import Instead
from fxpipe.passes.captured.simplify import RULES_OF, rewrite
from fxpipe.passes.colored.merge_equal import merge_equal


def simplify_views(graph: fx.Graph) -> None:
    for node in call_nodes(graph):  # what a rule makes of a view, the rules for its users see
        # Another view in its place would else be another message, or another saved value.
        inside = (u.op != "output" and u.meta["color"] == node.meta["color"] for u in node.users)
        if is_view(node) and all(inside):
            while any(_apply(find, node) for find in RULES_OF.get(node.target, ())):
                pass
    # Simpler views of one value are often equal.
    merge_equal(graph, which=is_view)


def _apply(find: Callable[[fx.Node], Instead], node: fx.Node) -> bool:
    """Apply a rule to a view that has users."""
    instead = find(node) if node.users else None
    if instead is None or not _are_there(node, instead):
        return False
    rewrite(node, instead)
    return True


def _are_there(node: fx.Node, instead: Instead) -> bool:
    """Whether the section of a node has these values anyway."""
    values: list[fx.Node] = []
    fx.map_arg(instead, values.append)
    color = node.meta["color"]
    return all(
        n.op == "placeholder"
        or n.meta["color"] == color
        or any(user.op != "output" and user.meta["color"] == color for user in n.users)
        for n in values
    )
