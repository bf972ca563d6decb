"""Computes conjugates, negatives and zeros, which torch only marks.

before: _conj(x), _neg_view(x), _efficientzerotensor([4])       views of x with a mark; zeros without memory
after:  conj_physical(x), neg(x), zeros([4])

A message, an offload or another copy of a tensor removes the mark.  No op may write to zeros without memory,
the tangents of forward-mode differentiation; what torch leaves out for them, the trace has left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpipe.ir.storage import call_nodes

aten = torch.ops.aten
_COMPUTED: dict[object, Any] = {
    aten._conj.default: aten.conj_physical.default,
    aten._neg_view.default: aten.neg.default,
    aten._efficientzerotensor.default: aten.zeros.default,
}


def compute_marked_values(graph: fx.Graph) -> None:
    for node in call_nodes(graph):
        node.target = _COMPUTED.get(node.target, node.target)
