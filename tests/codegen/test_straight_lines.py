"""Which straight lines of a program are worth a function that is compiled."""

import torch
from torch import fx

from fxpipe.codegen.layers.straight_lines import is_worth_compiling

aten = torch.ops.aten


def test_two_ops_of_a_value_are_worth_compiling():
    graph = fx.Graph()
    x = graph.placeholder("x")
    once, twice = (graph.call_function(aten.exp.default, (x,)) for _ in range(2))
    table = graph.call_function(aten.arange.default, (4,))
    mask = graph.call_function(aten.gt.Scalar, (table, 2))
    assert is_worth_compiling([once, twice])
    assert not is_worth_compiling([once])
    assert not is_worth_compiling([table, mask]), "they are made of nothing"
