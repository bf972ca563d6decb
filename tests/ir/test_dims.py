"""A dimension goes where changes of its entries show in the result of an op."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.ir.dims import Lost, through

aten = torch.ops.aten
SHAPE = (2, 3, 4)
OPS = {
    "t": (lambda x: aten.t(x[0]), {0: Lost.MIXED}),
    "transpose": (lambda x: aten.transpose(x, 0, -1), None),
    "permute": (lambda x: aten.permute(x, [1, -1, 0]), None),
    "view": (lambda x: aten.view(x, [2, 12]), None),
    "view, split": (lambda x: aten.view(x, [2, 3, 2, 2]), None),
    "expand": (lambda x: aten.expand(x, [5, 2, 3, 4]), None),
    "add": (lambda x: x + torch.ones(4), None),
    "add, broadcast": (lambda x: torch.ones(5, 1, 1, 1) + x, None),
    "copy": (lambda x: x.clone(), None),
    "unsqueeze": (lambda x: aten.unsqueeze(x, 1), None),
    "squeeze": (lambda x: aten.squeeze(x[:, :1], 1), {1: Lost.MIXED}),
    "select": (lambda x: aten.select(x, 1, 2), {1: Lost.MIXED}),
    "select_backward": (lambda x: aten.select_backward(x, [2, 5, 3, 4], 1, 2), None),
    "slice": (lambda x: aten.slice(x, 1, 1, 3), {1: Lost.MIXED}),
    "cat": (lambda x: torch.cat([x, torch.ones(2, 1, 4)], 1), {1: Lost.MIXED}),
    "stack": (lambda x: torch.stack([x, torch.ones(2, 3, 4)], 1), None),
    "split": (lambda x: aten.split.Tensor(x, 2, 2)[1], {2: Lost.MIXED}),
    "pad": (lambda x: aten.constant_pad_nd(x, [1, 1]), {2: Lost.MIXED}),
    "flip": (lambda x: aten.flip(x, [1]), {1: Lost.MIXED}),
    "cumsum": (lambda x: aten.cumsum(x, 1), {1: Lost.MIXED}),
    "sum": (lambda x: aten.sum(x), {0: Lost.SUMMED, 1: Lost.SUMMED, 2: Lost.SUMMED}),
    "sum, two": (lambda x: aten.sum(x, [0, -1]), {0: Lost.SUMMED, 2: Lost.SUMMED}),
    "mean, kept": (lambda x: aten.mean(x, [1], True), {1: Lost.SUMMED}),
    "amax": (lambda x: aten.amax(x, [0]), {0: Lost.MIXED}),
    "max": (lambda x: aten.max(x, 1)[0], {1: Lost.MIXED}),
    "sort": (lambda x: aten.sort(x, 2)[0], {2: Lost.MIXED}),
    "softmax": (lambda x: torch.softmax(x, 1), {0: Lost.MIXED, 1: Lost.MIXED, 2: Lost.MIXED}),
}


def shown_dims(function, x, dim):
    """The dimensions of the result of which exactly one entry changes with one entry of ``dim``."""
    changed = x.clone()
    changed.select(dim, 1).add_(torch.rand_like(x.select(dim, 1)))
    differs = (function(x) != function(changed)).nonzero()
    return {k for k in range(differs.shape[1]) if {*differs[:, k].tolist()} == {1}}


@pytest.mark.parametrize("name", OPS)
def test_a_dimension_goes_where_its_entries_show(name):
    function, lost = OPS[name]
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    graph = make_fx(function)(x).graph
    placeholder, *ops = graph.nodes
    for dim in range(x.dim()):
        node, place = placeholder, dim
        for op in ops[:-1]:
            if isinstance(place, int) and node in op.all_input_nodes:
                place, node = through(op, node, place), op
        if lost is not None and dim in lost:
            assert place is lost[dim]
        elif isinstance(place, int):
            assert place in shown_dims(function, x, dim)
            assert node.meta["val"].shape[place] == x.shape[dim]
        else:  # merged with another one, or divided, by a reshape
            assert (place, name[:4]) == (Lost.MIXED, "view")
