"""Splits the gradient of a parameter that several stages use into one summand per stage.

before: grads[w] = (a + b,)      with a made in one stage and b in another
after:  grads[w] = (a, b)        each accumulated where it is made; the ranks sum once a step
"""

from __future__ import annotations

from torch import fx

from fxpipe.ir.ops import adds_values, summands_of
from fxpipe.ir.storage import call_nodes, drop_dead, graph_outputs, set_outputs


def untie(graph: fx.Graph) -> None:
    stages: dict[fx.Node, set[int]] = {}  # of the summands of sums across stages

    def stages_of(node: fx.Node) -> set[int]:
        return stages.get(node) or ({node.meta["color"].stage} if node.op == "call_function" else set())

    for node in call_nodes(graph):
        if adds_values(node) and node.meta["origin"].seq is None and len(node.users) == 1:
            # A sum within one stage is itself a summand: autograd's own order is kept there, with its bits.
            across = stages_of(node).union(*map(stages_of, node.all_input_nodes))
            if len(across) > 1:
                stages[node] = across
    grads = graph_outputs(graph).grads
    set_outputs(graph, grads={name: summands_of(sums, stages.__contains__) for name, sums in grads.items()})
    drop_dead(graph)
