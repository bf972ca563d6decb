"""Lets an op compute each result: loss and outputs that are inputs of the step are copied.

before: output["outputs"]["labels"] = labels (a leaf of the batch)
after:  output["outputs"]["labels"] = clone(labels) (F, where labels is used)
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.storage import call_nodes, output_dict
from fxpipe.schedule.ops import Phase

aten = torch.ops.aten


def copy_given_results(graph: fx.Graph) -> None:
    named = output_dict(graph)
    loss = named["loss"]
    given = [n for n in (loss, *named["outputs"].values()) if n is not None and n.op == "placeholder"]
    copies = {node: _copied(graph, node) for node in dict.fromkeys(given)}
    outputs = {name: copies.get(node, node) for name, node in named["outputs"].items()}
    graph.output_node().args = ({**named, "loss": copies.get(loss, loss), "outputs": outputs},)


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    forward = [n for n in call_nodes(graph) if n.meta["color"].phase is Phase.F]
    at = next((n for n in forward if n in node.users), forward[-1])
    with graph.inserting_before(graph.output_node()):
        copy = graph.call_function(aten.clone.default, (node,))
    copy.meta.update(val=node.meta["val"], origin=at.meta["origin"], color=at.meta["color"])
    return copy
