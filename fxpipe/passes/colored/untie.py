"""Splits the gradient of a parameter that several stages use into one summand per stage.

before: grads[w] = (a + b,)      with a made in one stage and b in another
after:  grads[w] = (a, b)        each accumulated where it is made; the ranks sum once a step
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.storage import drop_dead, graph_outputs, set_outputs

aten = torch.ops.aten


def untie(graph: fx.Graph) -> None:
    summands: dict[fx.Node, list[fx.Node]] = {}  # of the sums across stages
    # In the graph's order, operands first, and without recursion: a weight of a loop has as many uses as that
    # has rounds, and a sum as deep.
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        is_of_values = not node.kwargs and all(isinstance(n, fx.Node) for n in node.args)
        if not is_of_values or node.meta["origin"].seq is not None or len(node.users) != 1:
            continue
        parts = [summand for n in node.args for summand in summands.get(n, [n])]
        # A sum within one stage is itself a summand: autograd's own order is kept there, with its bits.
        stages = {n.meta["color"].stage for n in (node, *parts) if n.op != "placeholder"}
        if len(stages) > 1:
            summands[node] = parts
    grads = graph_outputs(graph).grads.items()
    set_outputs(
        graph, grads={name: tuple(s for x in sums for s in summands.get(x, [x])) for name, sums in grads}
    )
    drop_dead(graph)
