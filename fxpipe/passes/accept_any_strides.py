"""Makes the graph valid for any strides of a kernel's result.

before: gelu_backward ──► view              gelu_backward ──► as_strided, group_norm_backward
after:  gelu_backward ──► reshape           gelu_backward ──► contiguous ──► as_strided, group_norm_backward

The trace predicts strides by rules that kernels do not always follow (softplus, elu, hardswish backward, the
backwards of losses, batch norm of a transposed input; others on other devices).  A ``contiguous()`` in the
model or in autograd leaves no op in the trace where the prediction makes it superfluous, but the kernel
behind it may read memory as if it had run.  ``reshape`` and ``contiguous`` are views if the strides are those
of the trace, and copies otherwise.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.builder import Calls
from fxpipe.ir.compat import OpOverload
from fxpipe.ir.storage import call_nodes

aten = torch.ops.aten

_VIEWS = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default}
_BY_STRIDE = {aten.as_strided.default, aten.view_as_complex.default, aten.view.dtype}
#: Ops whose kernels give other results, or an error, for operands in another layout: the only ones of the 400
#: of ``torch.testing``'s samples.
_BY_LAYOUT = {
    aten._pdist_backward.default,
    aten._pdist_forward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.fractional_max_pool2d_backward.default,
    aten.fractional_max_pool3d_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten.nll_loss2d_backward.default,
}
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def accept_any_strides(graph: fx.Graph) -> None:
    call = Calls(graph)
    for node in call_nodes(graph):
        if node.target in _VIEWS:
            # A view raises where strides are others than in the trace; a reshape copies then.
            node.target, node.args = aten.reshape.default, node.args[:2]
        elif node.target in _BY_STRIDE or node.target in _BY_LAYOUT or _is_custom(node.target):
            for source in node.all_input_nodes:
                if source.op == "call_function" and (format := _format(source.meta.get("val"))) is not None:
                    node.replace_input_with(source, _in_format(call, node, source, format))


def _is_custom(target: object) -> bool:
    """Whether an op is neither torch's own nor one between lanes: its code may read memory in any way."""
    return isinstance(target, OpOverload) and target.namespace not in ("aten", "prims", "lanes")


def _format(value: object) -> torch.memory_format | None:
    """The memory format that a tensor fills from the beginning of its storage; of one element, it has all."""
    if isinstance(value, torch.Tensor) and value.numel() > 1 and not value.storage_offset():
        for format in (torch.contiguous_format, _FORMATS.get(value.dim())):
            if format is not None and value.is_contiguous(memory_format=format):
                return format
    return None


def _in_format(call: Calls, user: fx.Node, source: fx.Node, format: torch.memory_format) -> fx.Node:
    kwargs: dict[str, object] = {} if format is torch.contiguous_format else {"memory_format": format}
    meta = {**source.meta, "color": user.meta["color"], "origin": user.meta["origin"]}
    with user.graph.inserting_before(user):
        return call(aten.contiguous.default, (source,), kwargs, **meta)
