"""Casts parameters to fewer bits once a step, instead of once a microbatch.

needs:  W split off
before: mm(x, _to_copy(w, bfloat16))      in F, whose copy of w each microbatch keeps for B
after:  mm(x, w_as_bfloat16)              an input of each section, which the program computes first of all

autocast casts the weights of products so.  A copy with more bits than the parameter stays where it is.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.casts import Cast
from fxpipe.ir.graph import Input, Kind, Origin
from fxpipe.ir.names import identifier
from fxpipe.ir.storage import call_nodes, drop_dead

aten = torch.ops.aten


def cast_once(graph: fx.Graph) -> None:
    first = next(n for n in graph.nodes if n.op != "placeholder")
    inputs: dict[Cast, fx.Node] = {}
    for node in call_nodes(graph):
        cast = _cast(node)
        if cast is None or graph.output_node() in node.users:
            continue
        if cast not in inputs:
            with graph.inserting_before(first):
                new = graph.placeholder(identifier(str(cast)))
            new.meta.update(input=Input(Kind.CAST, str(cast)), val=node.meta["val"], origin=Origin())
            inputs[cast] = new
        node.replace_all_uses_with(inputs[cast])
    drop_dead(graph)


def _cast(node: fx.Node) -> Cast | None:
    """The cast that a node makes of a parameter, if it has fewer bits and the same layout."""
    source = node.args[0] if node.target is aten._to_copy.default else None
    if not isinstance(source, fx.Node) or source.op != "placeholder":
        return None
    given, old, new = source.meta["input"], source.meta["val"], node.meta["val"]
    narrower = new.dtype.is_floating_point and new.dtype.itemsize < old.dtype.itemsize
    alike = (old.device, old.layout, old.stride()) == (new.device, new.layout, new.stride())
    return Cast(given.name, new.dtype) if given.kind is Kind.PARAMETER and narrower and alike else None
