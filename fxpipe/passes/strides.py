"""Makes views valid for any strides of a kernel's result.

needs:  the graph as it will run
before: gelu_backward ──► view                     gelu_backward ──► as_strided
after:  gelu_backward ──► reshape                  gelu_backward ──► contiguous ──► as_strided

The trace predicts strides by rules that kernels do not always follow (softplus, elu, hardswish backward,
batch norm of a transposed input; others on other devices).  ``reshape`` and ``contiguous`` are views if the
strides are those of the trace, and copies otherwise.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.storage import call_nodes

aten = torch.ops.aten

_VIEWS = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default}
_BY_STRIDE = {aten.as_strided.default, aten.view_as_complex.default, aten.view.dtype}


def accept_any_strides(graph: fx.Graph) -> None:
    for node in call_nodes(graph):
        source = node.args[0] if node.args else None
        if node.target in _VIEWS:
            node.target, node.args = aten.reshape.default, node.args[:2]
        elif node.target in _BY_STRIDE and isinstance(source, fx.Node) and source.op == "call_function":
            val = source.meta["val"]
            if val.is_contiguous() and not val.storage_offset():
                with graph.inserting_before(node):
                    dense = graph.call_function(aten.contiguous.default, (source,))
                dense.meta = {**source.meta, "color": node.meta["color"], "origin": node.meta["origin"]}
                node.args = (dense, *node.args[1:])
