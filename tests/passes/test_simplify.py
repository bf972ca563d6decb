"""What ``simplify`` leaves out and what it must leave in, on values that break wrong rules."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxpipe
from fxpipe.ir.graph import Input, Kind, Origin
from fxpipe.ir.storage import call_nodes
from fxpipe.passes.captured.identities import RULES
from fxpipe.passes.captured.simplify import rewrite, simplify

aten = torch.ops.aten
INF = float("inf")
FLOATS = torch.tensor([[-0.0, 0.0, INF, -INF], [float("nan"), 1e-40, -3.5, 2.0]])
INTEGERS = torch.tensor([[0, -1, 1 << 62, 3], [4, 5, -6, 7]])
BOOLS = INTEGERS > 3
COMPLEX = torch.complex(FLOATS, FLOATS.flip(0))


def traced(function, x: torch.Tensor) -> fx.Graph:
    """The graph of a function of a leaf of the batch; an op uses its result, which keeps all bits."""
    graph = make_fx(lambda x: torch.cat([y := function(x), y]), tracing_mode="fake")(x).graph
    for node in graph.nodes:
        node.meta["origin"] = Origin()
        if node.op == "placeholder":
            node.meta["input"] = Input(Kind.BATCH, "x")
    return graph


def left(graph: fx.Graph) -> list[str]:
    return [n.target.__name__.partition(".")[0] for n in call_nodes(graph)][:-1]


LEFT_OUT = {
    "view of its shape": (lambda x: x.view(2, 4), FLOATS, []),
    "view of a view": (lambda x: x.view(8).view(4, 2).view(2, 4), FLOATS, []),
    "expand": (lambda x: x.expand(2, 4), FLOATS, []),
    "slice": (lambda x: aten.slice(x, 1, 0, 1 << 60), FLOATS, []),
    "squeeze": (lambda x: aten.squeeze(x, 0), FLOATS, []),
    "t": (lambda x: x.t().t(), FLOATS, []),
    "transpose": (lambda x: x.transpose(0, 1).transpose(0, 1), FLOATS, []),
    "permute": (lambda x: x.view(2, 2, 2).permute(1, 2, 0).permute(2, 0, 1).view(2, 4), FLOATS, []),
    "view of an added dimension": (lambda x: x.unsqueeze(0).view(8), FLOATS, ["view"]),
    "unsqueeze, squeeze": (lambda x: x.unsqueeze(0).squeeze(0), FLOATS, []),
    "exchanged four times": (lambda x: x.t().transpose(-1, -2).transpose(0, 1).permute(1, 0), FLOATS, []),
    "split of one": (lambda x: x.split(4, 1)[0], FLOATS, []),
    "split of one and none": (lambda x: x.split([4, 0], 1)[0], FLOATS, []),
    "unbind of one": (lambda x: x.unsqueeze(1).unbind(1)[0], FLOATS, []),
    "select of one": (lambda x: x[None][0], FLOATS, []),
    "select of equal ones": (lambda x: x.expand(3, 2, 4)[2], FLOATS, []),
    "all windows": (lambda x: x.unfold(1, 4, 1).squeeze(1), FLOATS, []),
    "real, complex": (lambda x: torch.view_as_complex(torch.view_as_real(x)), COMPLEX, []),
    "detach": (lambda x: aten.alias(aten.detach(x)), FLOATS, []),
    "none at all": (lambda x: x[:0].t().t(), FLOATS, ["slice"]),
    "slice_backward": (lambda x: aten.slice_backward(x, [2, 4], 1, 0, 4, 1), FLOATS, []),
    "clone": (lambda x: x.clone(), FLOATS, []),
    "_to_copy": (lambda x: aten._to_copy(x, dtype=torch.float32), FLOATS, []),
    "cat": (lambda x: torch.cat([x[:0], x, x.new_empty(0)]), FLOATS, []),
    "cat of two": (lambda x: torch.cat([x[:1], x[:0], x[1:]]), FLOATS, ["slice", "slice", "cat"]),
    "cat, another layout": (lambda x: torch.cat([x[:0].t(), x.t()], 1), FLOATS, ["t", "cat"]),
    "x + 0": (lambda x: x + 0, INTEGERS, []),
    "x - 0": (lambda x: x - 0, FLOATS, []),
    "x * 1": (lambda x: x * 1.0, FLOATS, []),
    "x / 1": (lambda x: x / 1, FLOATS, []),
    "x ** 1": (lambda x: x**1.0, FLOATS, []),
    "-(-x)": (lambda x: x.neg().neg(), FLOATS, []),
    "not not x": (lambda x: ~~x, BOOLS, []),
}  # fmt: skip

LEFT_IN = {
    "-0.0 + 0 is 0.0": (lambda x: x + 0, FLOATS),
    "-0.0 - -0.0 is 0.0": (lambda x: x - (-0.0), FLOATS),
    "an infinity times 1 + 0j is nan": (lambda x: x * 1, COMPLEX),
    "int * float is float": (lambda x: x * 1.0, INTEGERS),
    "int / int is float": (lambda x: x / 1, INTEGERS),
    "bool + int is int": (lambda x: x + 0, BOOLS),
    "bool * True": (lambda x: x * True, BOOLS),
    "bool + False": (lambda x: x + False, BOOLS),
    "x + 2 * 0": (lambda x: torch.add(x, 0, alpha=2), INTEGERS),
    "x - 2 * 0": (lambda x: torch.sub(x, 0, alpha=2), FLOATS),
    "~x of integers once": (lambda x: ~x, INTEGERS),
    "a part": (lambda x: x[:, 1:], FLOATS),
    "other strides": (lambda x: x.clone(memory_format=torch.preserve_format).t(), FLOATS),
    "transposed once, square": (lambda x: x[:, :2].t(), FLOATS),
    "other dimensions": (lambda x: x.view(2, 2, 2).transpose(0, 1).transpose(1, 2), FLOATS),
    "permuted on": (lambda x: x.view(2, 2, 2).permute(1, 2, 0).permute(1, 2, 0), FLOATS),
    "transposed, one number in all places": (lambda x: x.t(), torch.ones(()).expand(4, 4)),
    "by its own strides": (lambda x: torch.as_strided(x, (2, 4), (4, 1)), FLOATS),
    "an empty one of more bits": (lambda x: torch.cat([x[:0].double(), x]), FLOATS),
    "another layout": (lambda x: x.t().clone(memory_format=torch.contiguous_format), FLOATS),
    "another dtype": (lambda x: x.double(), FLOATS),
    "a small part of a large value": (lambda x: (x.exp()[:1]).clone(), FLOATS),
}


def run(graph: fx.Graph, x: torch.Tensor) -> torch.Tensor:
    return fx.GraphModule({}, graph)(x)


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", LEFT_OUT)
def test_is_left_out(name):
    function, x, ops = LEFT_OUT[name]
    graph = traced(function, x)
    before = run(graph, x)
    simplify([graph])
    assert left(graph) == ops
    assert_same_bits(run(graph, x), before)


@pytest.mark.parametrize("name", LEFT_IN)
def test_is_left_in(name):
    function, x = LEFT_IN[name]
    graph, whole = traced(function, x), traced(function, x)
    simplify([graph])
    assert set(left(graph)) >= {left(whole)[-1]}
    assert_same_bits(run(graph, x), run(whole, x))


def reshaped(x: torch.Tensor, shape: list[int]) -> fx.Graph:
    """The graph of an ``aten.reshape``, which no trace has, of the transposed leaf."""
    graph = traced(lambda x: x.t().view(shape), x)
    (view,) = graph.find_nodes(op="call_function", target=aten.view.default)
    view.target = aten.reshape.default
    return graph


def test_a_reshape_to_the_same_shape_is_its_operand_of_any_strides():
    graph = reshaped(FLOATS, [4, 2])
    simplify([graph])
    assert left(graph) == ["t"]


def test_a_reshape_to_another_shape_stays():
    graph = reshaped(FLOATS, [2, 2, 2])
    simplify([graph])
    assert left(graph) == ["t", "reshape"]


def test_each_rule_has_an_example():
    ops = [node for function, x, _ in LEFT_OUT.values() for node in call_nodes(traced(function, x))]
    ops += call_nodes(reshaped(FLOATS, [4, 2]))
    for rule in RULES:
        assert any(n.target in rule.ops and rule.find(n) is not None for n in ops), rule.before


def test_the_traces_at_other_sizes_lose_the_same_ops():
    """A view that keeps the shape at one size alone stays in both."""
    same, other = (traced(lambda x: x.view(2, -1) * 1, x) for x in (FLOATS, torch.ones(4, 4)))
    simplify([same, other])
    assert left(same) == left(other) == ["view"]


def test_a_part_of_the_same_length_at_one_size_alone_stays():
    same, other = (traced(lambda x: x.split([2, len(x) - 2])[0], torch.ones(n, 4)) for n in (2, 4))
    simplify([same, other])
    assert left(same) == left(other) == ["split_with_sizes", "getitem"]


def test_the_strides_that_a_trace_predicted_prove_nothing():
    """They are stale where a pass gave an op other operands."""
    graph = traced(lambda x: x.t(), torch.ones(4, 4))
    (x,), (t, _) = graph.find_nodes(op="placeholder"), call_nodes(graph)
    t.meta["val"] = x.meta["val"]
    simplify([graph])
    assert left(graph) == ["t"]


def test_a_value_in_two_shapes_is_not_needed_in_a_third():
    """A cut behind ``y`` would send ``x.exp()`` beside it.  A permutation is no other shape."""

    def reshaped(x):
        y = x.exp().view(8)
        return y.sin().view(2, 4) * y.view(2, 4)

    def exchanged(x):
        y = x.exp().t()
        return y.sin().t() * y.t()

    for function, ops in ((reshaped, ["exp", "view", "sin", "view", "view", "mul"]),
                          (exchanged, ["exp", "t", "sin", "t", "mul"])):  # fmt: skip
        graph = traced(function, torch.ones(2, 4))
        simplify([graph])
        assert left(graph) == ops


def test_a_parameter_does_not_take_the_place_of_its_view():
    graph = traced(lambda x: x.t().t(), FLOATS)
    (x,) = graph.find_nodes(op="placeholder")
    x.meta["input"] = Input(Kind.PARAMETER, "x")
    simplify([graph])
    assert left(graph) == ["t", "t"]


class Viewed(nn.Module):
    """Views of all, of values with and without gaps, and in the backward of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)[None][0].chunk(1, -1)[0].tanh()
        z = self.second(y.expand(3, *y.shape)[1]).transpose(0, 1).unsqueeze(0).squeeze(0).transpose(1, 0)
        z = torch.view_as_real(torch.view_as_complex(z.unflatten(-1, (2, 2)))).flatten(-2)
        return (z.unsqueeze(1).unbind(1)[0] * y).square().mean()


@pytest.mark.in_ci("")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("options", [{}, {"dimensions": {"sequence": 6}}], ids=["", "dimensions"])
def test_the_certificate_accepts_a_model_without_its_views_of_all(options):
    torch.manual_seed(0)
    model, x = Viewed(), torch.randn(2, 6, 4)
    pipe = fxpipe.compile(model, (x,), ranks=1, microbatches=1, schedule="1f1b", **options)
    found = pipe.run_local((x,))
    loss = model(x)
    loss.backward()
    ops = {n.target for n in call_nodes(pipe.graph)}
    assert ops.isdisjoint({aten.split.Tensor, aten.unbind.int, aten.select.int, aten.transpose.int})
    assert torch.equal(found.loss, loss)
    assert all(torch.equal(found.grads[name], p.grad) for name, p in model.named_parameters())


class Cached(nn.Module):
    """Attention with an empty key-value cache, as a model for generation trains.  In the second layer the
    queries of two heads have one key."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 48), nn.Linear(16, 32)])

    def forward(self, x):
        for layer, width in zip(self.layers, (16, 8), strict=True):
            q, k, v = (y.view(2, 5, -1, 8).transpose(1, 2) for y in layer(x).split((16, width, width), -1))
            k, v = (torch.cat([torch.tensor([], dtype=x.dtype), y], -2) for y in (k, v))
            k, v = (y.expand(2, 2, 5, 8) for y in (k, v))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 5, 16)
        return x.square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_empty_cache_copies_no_keys(dtype):
    torch.manual_seed(0)
    model, x = Cached().to(dtype), torch.randn(2, 5, 16).to(dtype)
    pipe = fxpipe.compile(model, (x,), ranks=1, microbatches=1, schedule="1f1b")
    found = pipe.run_local((x,))
    loss = model(x)
    loss.backward()
    copied = [n for n in call_nodes(pipe.graph) if n.target is aten.cat.default]
    assert all(n.meta["origin"].backward for n in copied)  # of the gradients of q, k and v
    assert not any(n.meta["input"].kind is Kind.CONSTANT for n in pipe.graph.find_nodes(op="placeholder"))
    assert torch.equal(found.loss, loss)
    assert all(torch.equal(found.grads[name], p.grad) for name, p in model.named_parameters())


def test_a_large_value_is_kept_for_a_small_copy_if_the_backward_needs_it_anyway():
    """A part of ``y`` is copied, and the backward needs all of ``y`` or only the part."""

    class Part(nn.Module):
        def __init__(self, uses_all: bool) -> None:
            super().__init__()
            self.weight, self.uses_all = nn.Parameter(torch.ones(8)), uses_all

        def forward(self, x):
            y = self.weight * x
            part = y[:1].clone().tanh().square().sum()
            return part + (y.square().sum() if self.uses_all else y.sum())

    for uses_all, clones in ((True, 0), (False, 1)):
        pipe = fxpipe.compile(Part(uses_all), (torch.ones(4, 8),), ranks=1, microbatches=1, schedule="1f1b")
        assert sum(n.target is aten.clone.default for n in call_nodes(pipe.graph)) == clones


def test_a_long_chain_of_ops_without_use_is_erased():
    graph = fx.Graph()
    x = unused = graph.placeholder("x")
    for _ in range(1500):
        unused = graph.call_function(aten.sin.default, (unused,))
    both = graph.call_function(aten.add.Tensor, (x, unused))
    graph.output(both)
    rewrite(both, x)
    assert [node.op for node in graph.nodes] == ["placeholder", "output"]
