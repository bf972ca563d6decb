"""The views that ``simplify_views`` leaves out of a section, and those that other sections need."""

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.ir.graph import Input, Kind, Origin
from fxpipe.ir.storage import call_nodes
from fxpipe.passes.chosen.simplify_views import simplify_views
from fxpipe.schedule.ops import Color, Phase

aten = torch.ops.aten
WORDS, WIDTH = 11, 8


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": "full"}, {"ranks": 2, "vocab_parallel": "1-barrier"}, {"schedule": "1f1b"}],
    ids=["", "recompute", "vocab_parallel", "1f1b"],
)
def test_a_section_has_no_view_twice_and_undoes_none(options):
    torch.manual_seed(0)
    model, ids = Words(), torch.randint(WORDS, (4, 5))
    given = {"ranks": 1, "microbatches": 2, "schedule": "zb-h1"} | options
    pipe = fxpipe.compile(model, (ids[:2],), **given)
    assert pipe.graph is not None
    reshapes = [n for n in call_nodes(pipe.graph) if n.target is aten.reshape.default]
    assert len(reshapes) > 3
    for node in reshapes:
        source = node.args[0]
        assert node.meta["val"].shape != source.meta["val"].shape
        if source.target is aten.reshape.default and len(source.users) == 1:
            assert source.meta["color"] != node.meta["color"], (node, source)
    keys = [(n.meta["color"], n.target, repr(n.args), repr(n.kwargs)) for n in reshapes]
    assert len(set(keys)) == len(keys)
    found = pipe.run_local((ids,))
    (sum(model(ids[k : k + 2]) for k in (0, 2)) / 2).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.grads[name], parameter.grad)


def graph_of(*ops: tuple) -> fx.Graph:
    """ops: (phase, op, number of the operand, arguments), of one stage; 0 is a leaf of the batch."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(val=torch.empty(2, 4, device="meta"), input=Input(Kind.BATCH, "x"), origin=Origin())
    nodes = [x]
    for phase, op, operand, *arguments in ops:
        source = nodes[operand]
        node = graph.call_function(op, (source, *arguments))
        color = Color(0, Phase(phase))
        node.meta.update(val=op(source.meta["val"], *arguments), origin=Origin(), color=color)
        nodes.append(node)
    graph.output((nodes[-1],))
    return graph


NEG, VIEW, EXP = aten.neg.default, aten.view.default, aten.exp.default


def left(graph: fx.Graph) -> list[str]:
    return [f"{n.meta['color'].phase} {n.target.overloadpacket.__name__}" for n in call_nodes(graph)]


def test_views_of_a_section_that_give_back_its_operand_go():
    graph = graph_of(("B", NEG, 0), ("W", VIEW, 1, [8]), ("W", VIEW, 2, [2, 4]), ("W", EXP, 3), ("W", NEG, 4))
    simplify_views(graph)
    assert left(graph) == ["B neg", "W exp", "W neg"]


def test_a_value_for_another_section_stays():
    ops = ("B", NEG, 0), ("B", VIEW, 1, [8]), ("B", VIEW, 2, [2, 4]), ("W", EXP, 3), ("W", NEG, 4)
    graph = graph_of(*ops)
    simplify_views(graph)
    assert left(graph) == ["B neg", "B view", "B view", "W exp", "W neg"]


def test_a_section_takes_no_value_that_it_did_not_take():
    """W takes the flat view of B, and F's value would be kept for W in its place."""
    ops = ("F", EXP, 0), ("B", VIEW, 1, [8]), ("W", VIEW, 2, [4, 2]), ("W", EXP, 3), ("W", NEG, 4)
    graph = graph_of(*ops)
    simplify_views(graph)
    assert left(graph) == ["F exp", "B view", "W view", "W exp", "W neg"]


def test_a_section_has_equal_views_once():
    """Another section has its own; ops that take time stay, as costs are known by then."""
    ops = ("B", NEG, 0), ("B", VIEW, 1, [8]), ("B", VIEW, 1, [8]), ("B", EXP, 2), ("B", EXP, 3)
    graph = graph_of(*ops, ("W", VIEW, 1, [8]), ("W", EXP, 6), ("W", NEG, 7))
    exps = graph.find_nodes(op="call_function", target=EXP)[:2]
    graph.output_node().args = ((*exps, call_nodes(graph)[-1]),)
    simplify_views(graph)
    assert left(graph) == ["B neg", "B view", "B exp", "B exp", "W view", "W exp", "W neg"]
    assert exps[0].args == exps[1].args
