"""Properties of an op that several rooms ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any, cast

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxpipe.ir.builder import node_arg
from fxpipe.ir.dims import is_pointwise
from fxpipe.ir.graph import Origin
from fxpipe.ir.storage import argument, is_view, place_of
from fxpipe.plan.lanes import LaneGroup
from fxpipe.runtime.program.lanes import BEGIN_EXCHANGES as BEGIN_EXCHANGES  # of graph and runtime
from fxpipe.runtime.program.lanes import ENDS_EXCHANGE as ENDS_EXCHANGE
from fxpipe.runtime.program.lanes import SUM_OF_LANES as SUM_OF_LANES

aten = torch.ops.aten

#: Attention of packed documents -> the first of its arguments that is the queries, and its products with the
#: width of queries and with that of values.  torch's formulas read boundaries, where costs have sizes alone.
_OF_DOCUMENTS: dict[str, tuple[int, int, int]] = {
    "varlen_attention": (0, 1, 1),
    "varlen_attention_backward": (1, 3, 2),
    "_varlen_attn": (0, 1, 1),
    "_varlen_attn_backward": (1, 3, 2),
}

#: Attention on a CPU, which torch's table of FLOPs lacks, and the op with its arguments that has them.
_COUNTED_AS: dict[object, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}


def node_flops(node: fx.Node, value: Callable[[fx.Node], Any] = lambda n: n.meta.get("val")) -> Any:
    """FLOPs of one node: of a matrix product, a convolution or attention; 0 for other ops.

    value: a node's value, with tensors or with shapes that may be polynomials; the result is as they are.
    """
    packet = _packet(node.target)
    documents = _OF_DOCUMENTS.get(packet)
    formula = _formula(node.target)
    if formula is None and documents is None:
        return 0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
    if documents is not None:
        flops = _flops_of_one_document(args, *documents)
    else:
        if "scaled_dot_product" in packet:
            args = _with_all_heads(args, 1 if "backward" in packet else 0)
        flops = formula(*args, **kwargs, out_val=value(node))  # type: ignore[misc]  # it is one
    if not is_causal(node):
        return flops
    return flops // 2 if isinstance(flops, int) else flops * Fraction(1, 2)


def _packet(target: object) -> str:
    """The name of an op without its overload."""
    return getattr(getattr(target, "overloadpacket", None), "__name__", "")


def _flops_of_one_document(args: Sequence[Any], first: int, of_queries: int, of_values: int) -> Any:
    """FLOPs of attention where all tokens are one document, the most that they can be."""
    query, key, value = (getattr(x, "shape", x) for x in args[first : first + 3])
    tokens, heads, size = query
    return 2 * heads * tokens * key[0] * (of_queries * size + of_values * value[2])


@cache
def _formula(target: fx.node.Target) -> Callable[..., Any] | None:
    """What counts an op's FLOPs in torch's table; None for one that is not there."""
    packet = getattr(target, "overloadpacket", None)
    packet = _COUNTED_AS.get(packet, packet)
    if packet is None:
        return None
    in_place = getattr(aten, packet.__name__.removesuffix("_"), packet)  # addmm_ counts as addmm
    return flop_registry.get(packet) or flop_registry.get(in_place)


def has_flops(node: fx.Node) -> bool:
    """Whether the op is a matrix product, a convolution or attention."""
    return _formula(node.target) is not None or _packet(node.target) in _OF_DOCUMENTS


def begins_backward(node: fx.Node) -> bool:
    """Whether the op is what a backward starts from, the gradient of the loss: 1 / microbatches of a mean."""
    origin: Origin = node.meta.get("origin", Origin())
    is_full = node.op == "call_function" and node.target is aten.full.default and not node.args[0]
    return is_full and origin.backward and origin.seq is None


def is_causal(node: fx.Node) -> bool:
    """Whether the op is an attention that looks at earlier positions alone, half of the square."""
    is_window = is_of_documents(node) and argument(node, "right") == 0
    return is_window or argument(node, "is_causal") is True


def is_of_documents(node: fx.Node) -> bool:
    """Whether the op is an attention of packed documents, whose FLOPs depend on their lengths."""
    return _packet(node.target) in _OF_DOCUMENTS


def boundaries_of_documents(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The queries and the keys that an attention of packed documents is given, each with the boundaries of
    its documents; none for other ops, and for its backward."""
    is_forward = is_of_documents(node) and _OF_DOCUMENTS[_packet(node.target)][0] == 0
    pairs = zip(node.args[:2], node.args[3:5], strict=True) if is_forward else ()
    return [(x, ends) for x, ends in pairs if isinstance(x, fx.Node) and isinstance(ends, fx.Node)]


def is_masked(node: fx.Node) -> bool:
    """Whether the op is an attention that is given a mask, or the backward of one."""
    return isinstance(argument(node, "attn_mask") or argument(node, "attn_bias"), fx.Node)


def _with_all_heads(args: Sequence[Any], first: int) -> Any:
    """The arguments of attention with as many heads of keys and values as of queries.

    first: the queries' position.  Kernels repeat heads that groups of queries share, which torch 2.11 cannot
        count.
    """
    query, key, value = (getattr(x, "shape", x) for x in args[first : first + 3])
    with_all = [query, *((n, query[1], *others) for n, _, *others in (key, value))]
    return [*args[:first], *with_all, *args[first + 3 :]]


def is_elementwise(node: fx.Node) -> bool:
    """Whether an op computes each entry of its result from the entries at the same place: also a view, or a
    cast."""
    return is_view(node) or node.target is aten._to_copy.default or is_pointwise(node)


def adds_values(node: fx.Node) -> bool:
    """Whether an op adds two values of its shape, without a factor."""
    is_add = node.target is aten.add.Tensor and not node.kwargs
    return is_add and all(
        isinstance(x, fx.Node) and x.meta["val"].shape == node.meta["val"].shape for x in node.args
    )


def summands_of(
    sums: Iterable[fx.Node], is_split: Callable[[fx.Node], bool] = adds_values
) -> tuple[fx.Node, ...]:
    """The summands of sums of sums, in order.  is_split: whether a value is such a sum."""
    summands, todo = list[fx.Node](), [*sums][::-1]
    while todo:  # no recursion: a weight of a loop has as many summands as that has rounds
        node = todo.pop()
        if is_split(node):
            todo += (node_arg(node, 1), node_arg(node, 0))
        else:
            summands.append(node)
    return tuple(summands)


def lane_group(node: fx.Node) -> LaneGroup:
    """The lanes that an op of lanes is between, or whose number it takes; 0 for all."""
    first = place_of(node, "n")
    return LaneGroup(*cast(tuple[int, ...], node.args[first : first + 2] or (0,)))


def is_between_lanes(target: object) -> bool:
    """Whether an op communicates: all lanes must call it together."""
    return getattr(target, "namespace", "") == "lanes" and target not in (
        torch.ops.lanes.part.default,
        torch.ops.lanes.number.default,
        torch.ops.lanes.sum_shares.default,
    )
