"""The analytic cost of a node: floating-point operations and bytes moved, from its shapes alone."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from fxpipe.partition.device import Device
from fxpipe.values import is_view, node_bytes, tensors

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class NodeCost:
    flops: int
    bytes: int
    seconds: float


_FREE = NodeCost(0, 0, 0.0)


def node_cost(node: fx.Node, device: Device) -> NodeCost:
    """FLOPs (matrix products and convolutions, as ``torch.utils.flop_counter`` counts them), bytes
    read and written, and the roofline time on the device.  Views and placeholders cost nothing."""
    if node.op != "call_function" or node.target is operator.getitem or is_view(node):
        return _FREE
    flops = node_flops(node)
    moved = _bytes_moved(node)
    results = tensors(node)
    dtype = results[0].dtype if results else torch.float32
    return NodeCost(flops, moved, device.seconds(flops, moved, dtype))


def _bytes_moved(node: fx.Node) -> int:
    """What the op reads and writes; of a table that rows are looked up in or added to, those rows."""
    match node.target:
        case aten.embedding.default:
            return 2 * node_bytes(node) + node_bytes(node.args[1])  # type: ignore[arg-type]
        case aten.embedding_dense_backward.default:  # to be added by index_add_
            return 3 * node_bytes(node.args[0])  # type: ignore[arg-type]
        case aten.index_add_.default:
            return 3 * node_bytes(node.args[3])  # type: ignore[arg-type]
    return node_bytes(node) + sum(node_bytes(n) for n in node.all_input_nodes)


def node_flops(node: fx.Node) -> int:
    """FLOPs of one node; 0 for what is no matrix product, convolution or attention."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is not None and packet not in flop_registry:  # addmm_ counts as addmm
        packet = getattr(torch.ops.aten, packet.__name__.removesuffix("_"), packet)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta.get("val"), (node.args, dict(node.kwargs)))
    return formula(*args, **kwargs, out_val=node.meta["val"])
