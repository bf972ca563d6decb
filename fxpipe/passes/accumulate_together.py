"""Adds the small gradients of a stage, those of biases and norms, to their accumulators in one op.

before: add_(grad_a, a);  add_(grad_b, b)
after:  _foreach_add_([grad_a, grad_b], [a, b])

The sums are the same, bit for bit.  All operands live until the one op: large ones keep their own.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from fxpipe.ir.builder import node_arg
from fxpipe.ir.graph import Kind, Origin
from fxpipe.ir.storage import node_bytes, storage_root

aten = torch.ops.aten

LARGEST = 1 << 16
"""Maximum number of bytes of an operand."""


def accumulate_together(graph: fx.Graph) -> None:
    alike: defaultdict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        if _is_small_sum(node):
            total = node_arg(node, 0).meta["val"]
            alike[node.meta["color"], total.dtype, total.device].append(node)
    for nodes in alike.values():
        if len(nodes) > 1:
            _join(graph, nodes)


def _is_small_sum(node: fx.Node) -> bool:
    """Whether the op adds a small gradient, of its accumulator's dtype, as the only one of its parameter."""
    into, part = node_arg(node, 0), node_arg(node, 1)
    if into.op != "placeholder" or into.meta["input"].kind is not Kind.GRADIENT or len(into.users) > 1:
        return False
    a, b = into.meta["val"], part.meta["val"]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and node_bytes(storage_root(part)) <= LARGEST


def _join(graph: fx.Graph, sums: list[fx.Node]) -> None:
    """Replace the ops by one in the place of the last."""
    totals, parts = ([node_arg(node, k) for node in sums] for k in (0, 1))
    with graph.inserting_after(sums[-1]):
        joined = graph.call_function(aten._foreach_add_.List, (totals, parts))
    joined.meta.update(color=sums[0].meta["color"], origin=Origin(backward=True), val=None)
    for node in sums:
        node.replace_all_uses_with(joined)
        graph.erase_node(node)
