"""Moves the forward ops that compute new values of buffers alone up to their last operand.

before: h1 = …, h2 = …, loss = …, cat(memory1, h1), cat(memory2, h2)
after:  h1 = …, cat(memory1, h1), h2 = …, cat(memory2, h2), loss = …

A model that updates the memories of all its layers at its end leaves room for cuts then, as each is read and
written in one stage.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxpipe.ir.compat import pytree
from fxpipe.ir.storage import graph_outputs


def hoist_updates(graph: fx.Graph) -> None:
    others = {*pytree.tree_leaves(tuple(graph_outputs(graph)._replace(buffers={})))}
    alone: set[fx.Node] = set()
    # Users come first, so that a whole chain that ends in a buffer is alone.
    for node in reversed(graph.nodes):
        is_forward = node.op == "call_function" and not node.meta["origin"].backward
        if is_forward and node not in others and all(u in alone or u.op == "output" for u in node.users):
            alone.add(node)
    for node in [n for n in graph.nodes if n in alone]:
        # The order of the graph decides where the cut can be: behind its operand, the op is in the same
        # stage.
        last = max(node.all_input_nodes, default=node)  # in the graph's order
        if last.op == "call_function" and last is not node:
            last.append(node)
            # A later op with its number would be taken to belong there as well.
            node.meta["origin"] = replace(node.meta["origin"], seq=last.meta["origin"].seq)
