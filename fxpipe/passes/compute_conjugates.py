"""Computes conjugates and negatives, which torch only marks.

before: _conj(x), _neg_view(x)              views of x with a mark, which their own views rely on
after:  conj_physical(x), neg(x)

A message, an offload or another copy of a tensor removes the mark.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpipe.ir.storage import call_nodes

aten = torch.ops.aten
_COMPUTED: dict[Any, Any] = {
    aten._conj.default: aten.conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}


def compute_conjugates(graph: fx.Graph) -> None:
    for node in call_nodes(graph):
        node.target = _COMPUTED.get(node.target, node.target)
