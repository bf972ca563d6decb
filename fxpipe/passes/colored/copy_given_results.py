"""Lets an op compute each result: loss and outputs that are inputs of the step are copied.

before: outputs["labels"] = labels (a leaf of the batch)
after:  outputs["labels"] = clone(labels) (F, where labels is used)
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.builder import Calls
from fxpipe.ir.storage import call_nodes, graph_outputs, set_outputs
from fxpipe.schedule.ops import Phase

aten = torch.ops.aten


def copy_given_results(graph: fx.Graph) -> None:
    loss, requested = graph_outputs(graph).loss, graph_outputs(graph).outputs
    inputs = [n for n in (loss, *requested.values()) if n is not None and n.op == "placeholder"]
    copies = {node: _copied(graph, node) for node in dict.fromkeys(inputs)}
    outputs = {name: copies.get(node, node) for name, node in requested.items()}
    set_outputs(graph, loss=loss and copies.get(loss, loss), outputs=outputs)


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    forward = [n for n in call_nodes(graph) if n.meta["color"].phase is Phase.F]
    # Where the input is needed anyway; a rank that does not use it need not get it.
    at = next((n for n in forward if n in node.users), forward[-1])
    meta = {"val": node.meta["val"], "origin": at.meta["origin"], "color": at.meta["color"]}
    with graph.inserting_before(graph.output_node()):
        return Calls(graph)(aten.clone.default, (node,), **meta)
