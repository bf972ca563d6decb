"""The kinds of ops by which a calibrated device lists seconds, and the kind of a node.

Of products, convolutions and attention the size is their FLOPs, of all others the bytes that they read and
write.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import cast

import torch
from torch import fx

from fxpipe.ir.ops import BEGIN_EXCHANGES, is_between_lanes
from fxpipe.ir.storage import draws_numbers, is_view, tensors
from fxpipe.plan.work import BETWEEN_LANES, VIEW
from fxpipe.runtime.program.random import keyed

#: Kinds whose size is in FLOPs; each arithmetic has a curve of its own.  "thin product": with a dimension of
#: at most THIN.  "convolution weight": the gradients of weight and bias alone.
COMPUTING = (
    "product",
    "thin product",
    "batched product",
    "convolution",
    "convolution backward",
    "convolution weight",
    "attention",
    "attention backward",
)
#: Kinds whose size is in bytes.  "view": returns memory of its argument, so that its size is 0.  "strided":
#: an op on elements that lie in another order than its result's.
MOVING = ("move", "strided", "function", "reduction", "norm", "lookup", "random", VIEW)

_PACKETS: Mapping[str, tuple[str, ...]] = {
    "product": ("mm", "addmm", "_scaled_mm"),
    "batched product": ("bmm", "baddbmm"),
    "convolution": ("convolution", "_convolution", "convolution_overrideable"),
    "convolution backward": ("convolution_backward",),
    "function": (
        *("exp", "expm1", "log", "log1p", "log2", "sin", "cos", "tanh", "erf", "sigmoid", "softplus"),
        *("gelu", "silu", "elu", "mish", "log_sigmoid_forward", "logit", "logaddexp", "log_sigmoid_backward"),
        *("gelu_backward", "silu_backward", "elu_backward", "mish_backward", "softplus_backward"),
    ),
    "norm": (
        *("native_layer_norm", "native_batch_norm", "native_group_norm", "_fused_rms_norm", "_softmax"),
        *("_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
        *("native_layer_norm_backward", "native_batch_norm_backward", "native_group_norm_backward"),
        *("_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "logsumexp"),
    ),
    "lookup": (
        *("embedding", "embedding_dense_backward", "index", "index_put", "index_add", "index_select"),
        *("gather", "scatter", "scatter_add", "take", "nll_loss_forward", "nll_loss_backward"),
        *("sort", "topk"),
    ),
    "reduction": ("sum", "mean", "amax", "amin", "argmax", "argmin", "var", "var_mean", "cumsum", "prod"),
}
#: Products with a dimension of at most this are thin: a CPU's vectors and caches, and a GPU's tensor cores,
#: are made for more.
THIN = 32
_KIND_OF = {packet: kind for kind, packets in _PACKETS.items() for packet in packets}


def kind_of(node: fx.Node) -> str:
    """The kind of an op of the graph."""
    if is_view(node):
        return VIEW
    if is_between_lanes(node.target):
        # Only what is copied counts of an exchange that is on its way while other ops run.
        return "move" if node.target in BEGIN_EXCHANGES else BETWEEN_LANES
    # Before all else: the numbers take longer than what is done with them.
    if draws_numbers(node) or node.target is keyed:
        return "random"
    kind = _kind_of_target(node.target)
    # Such a product is bound by memory, far below the rate of large ones.
    if kind == "product":
        lengths = (n for x in (node, *node.all_input_nodes) for t in tensors(x) for n in t.shape)
        kind = "thin product" if min(lengths, default=0) <= THIN else kind
    if kind == "convolution backward" and not cast(list[bool], node.args[-1])[0]:
        return "convolution weight"
    return "strided" if kind == "move" and _is_strided(node) else kind


@cache
def _kind_of_target(target: object) -> str:
    packet = getattr(target, "overloadpacket", target)
    name = getattr(packet, "__name__", str(packet)).removesuffix("_")
    if "attention" in name or "_attn" in name:
        return "attention backward" if "backward" in name else "attention"
    if name in _KIND_OF:
        return _KIND_OF[name]
    tags = getattr(target, "tags", ())
    return "reduction" if torch.Tag.reduction in tags else "move"


def _is_strided(node: fx.Node) -> bool:
    """Whether an operand of the result's shape lies in another order than the result."""
    results = tensors(node)
    if not results or results[0].numel() < 2:
        return False
    order = _order(results[0])
    read = (t for n in node.all_input_nodes for t in tensors(n))
    # An expanded operand is read from cache, in whatever order.
    return any(t.shape == results[0].shape and 0 not in t.stride() and _order(t) != order for t in read)


def _order(tensor: torch.Tensor) -> list[int]:
    """The dimensions of more than one element, from the widest stride on."""
    wide = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
    return sorted(wide, key=tensor.stride, reverse=True)
