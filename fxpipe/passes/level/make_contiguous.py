"""Makes values that cross between stages fill their storage, so that a message carries each element once.

before: expand(x) or x[:, :8] (stage 0) ──► stage 1
after:  clone(expand(x)) (stage 0) ──► stage 1
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.builder import Calls
from fxpipe.ir.storage import call_nodes
from fxpipe.plan.tensors import is_dense

aten = torch.ops.aten


def make_contiguous(graph: fx.Graph) -> None:
    call = Calls(graph)
    for node in call_nodes(graph):
        far = [
            u for u in node.users if u.op != "output" and u.meta["color"].stage != node.meta["color"].stage
        ]
        # A dense value carries each element once as it is.
        if not far or is_dense(node.meta["val"]):
            continue
        val = node.meta["val"]
        meta = {**node.meta, "val": val.new_empty(val.shape)}
        with graph.inserting_after(node):
            copy = call(aten.clone.default, (node,), {"memory_format": torch.contiguous_format}, **meta)
        for user in far:
            user.replace_input_with(node, copy)
