"""Properties of an op that several rooms ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

#: Attention on a CPU, which torch's table of FLOPs lacks, and the op with its arguments that has them.
_COUNTED_AS: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}


def node_flops(node: fx.Node, value: Callable[[fx.Node], Any] = lambda n: n.meta.get("val")) -> Any:
    """FLOPs of one node: of a matrix product, a convolution or attention; 0 for other ops.

    value: a node's value, with tensors or with shapes that may be polynomials; the result is as they are.
    """
    packet = getattr(node.target, "overloadpacket", None)
    packet = _COUNTED_AS.get(packet, packet)
    if packet is not None and packet not in flop_registry:  # addmm_ counts as addmm
        packet = getattr(torch.ops.aten, packet.__name__.removesuffix("_"), packet)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
    return formula(*args, **kwargs, out_val=value(node))


def is_between_lanes(target: Any) -> bool:
    """Whether an op communicates: all lanes must call it together."""
    return getattr(target, "namespace", "") == "lanes" and target not in (
        torch.ops.lanes.part.default,
        torch.ops.lanes.number.default,
    )
