"""The summands of a gradient that several stages add to."""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.graph import Input, Kind, Origin, Outputs
from fxpipe.ir.storage import graph_outputs
from fxpipe.passes.colored.untie import untie
from fxpipe.schedule.ops import Color, Phase

aten = torch.ops.aten


def summands(stages: list[int]) -> list[str]:
    """The summands of a gradient that autograd has added up of one part a use, each of one of the stages."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(input=Input(Kind.BATCH, "x"), val=torch.empty(4))
    total: fx.Node | None = None
    for number, stage in enumerate(stages):
        meta = {"val": torch.empty(4), "color": Color(stage, Phase.B)}
        part = graph.create_node("call_function", aten.neg.default, (x,), name=f"part{number}")
        part.meta.update(meta, origin=Origin(seq=number, backward=True))
        if total is not None:
            part = graph.create_node("call_function", aten.add.Tensor, (total, part), name=f"sum{number}")
            part.meta.update(meta, origin=Origin(backward=True))
        total = part
    assert total is not None
    graph.output(Outputs(None, None, {}, {"w": (total,)}, {}))
    untie(graph)
    return [node.name for node in graph_outputs(graph).grads["w"]]


def test_a_sum_across_stages_is_taken_apart():
    assert summands([1, 0]) == ["part0", "part1"]


def test_a_sum_within_one_stage_is_one_summand():
    assert summands([1, 1]) == ["sum1"]
    assert summands([1, 1, 0]) == ["sum1", "part2"]


def test_a_weight_of_a_loop_may_have_more_uses_than_python_has_frames():
    assert summands([1, *[0] * 2000]) == [f"part{k}" for k in range(2001)]
