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
    grads = graph_outputs(graph).grads.items()
    set_outputs(
        graph, grads={name: tuple(s for part in parts for s in _summands(part)) for name, parts in grads}
    )
    drop_dead(graph)


def _summands(node: fx.Node) -> list[fx.Node]:
    """The summands of a sum across stages; a sum within one stage is itself a summand."""
    is_sum = node.target is aten.add.Tensor and not node.kwargs and node.meta["origin"].seq is None
    if not (is_sum and len(node.users) == 1):
        return [node]
    summands = [s for n in node.args for s in _summands(n)]  # type: ignore[arg-type]
    # Within one stage autograd's own order of the sum is kept, with its bits.
    stages = {n.meta["color"].stage for n in (node, *summands) if n.op != "placeholder"}
    return summands if len(stages) > 1 else [node]
