"""What is added to an accumulator, and by which op."""

import pytest
import torch
from torch import fx, nn

import fxpipe
from fxpipe.ir.graph import Color, Kind, Origin, Outputs, Phase
from fxpipe.ir.ops import node_flops
from fxpipe.passes.chosen import accumulate_together
from fxpipe.passes.level import fuse_accumulation

aten = torch.ops.aten
WIDTH, ROWS = 8, 6


class Mixed(nn.Module):
    """Under autocast, as most float32 models are trained: products in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, index):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.last(self.first(self.table(index)).tanh())
        return x.float().square().mean()


def accumulations(model: nn.Module, **options) -> dict[str, fx.Node]:
    """Parameter -> the op that writes to its accumulator."""
    index = torch.arange(ROWS) % 5
    pipe = fxpipe.compile(model, (index,), ranks=1, microbatches=2, schedule="1f1b", **options)
    assert pipe.graph is not None
    found = {}
    for node in pipe.graph.nodes:
        for into in node.all_input_nodes:
            kind = into.meta["input"].kind if into.op == "placeholder" else None
            if kind is Kind.GRADIENT and node.target is not aten.t.default:
                found[into.meta["input"].name] = node
    return found


def test_a_product_of_autocast_is_added_without_its_cast():
    found = accumulations(Mixed())
    product = found["first.weight"].args[1]
    assert found["first.weight"].target is aten.add_.Tensor
    assert isinstance(product, fx.Node)
    assert product.target is aten.mm.default
    assert product.meta["val"].dtype == torch.bfloat16
    assert found["first.weight"].meta["val"].dtype == torch.float32
    assert found["table.weight"].target is aten.index_add_.default


class Norm(nn.Module):
    """``native_layer_norm_backward`` gives the gradients of the input, weight and bias in one call."""

    def __init__(self, shape: tuple[int, ...], cast: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(WIDTH, *shape).mT) for _ in range(2))
        self.cast = cast

    def forward(self, x):
        weight, bias = (p.mT.to(self.cast) for p in (self.weight, self.bias))
        return nn.functional.layer_norm(x.to(self.cast), weight.shape, weight, bias).float()


@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16])
def test_a_matrix_that_an_op_of_b_gives_is_not_held_until_w(cast: torch.dtype):
    """As gradients of experts are, where one op makes them with that of their tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Norm((4,), cast) for _ in range(4)])
    x = torch.randn(4, 4, WIDTH).mT.contiguous()

    def loss_fn(output, batch):
        return output.mul(output).tanh().mean()

    pipe = fxpipe.compile(model, (x[:1],), ranks=2, microbatches=4, schedule="zb-h1", loss_fn=loss_fn)
    grads = pipe.run_local((x,)).grads
    loss_fn(model(x), None).backward()
    for name, parameter in model.named_parameters():
        most = 1e-6 if cast is torch.float32 else 0.02
        torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=most)
    assert pipe.check().holds
    totals = [x for x in pipe.graph.find_nodes(op="placeholder") if x.meta["input"].kind is Kind.GRADIENT]
    phases = {x.meta["input"].name: {user.meta["color"].phase for user in x.users} for x in totals}
    first = {"0.weight": {Phase.W}, "0.bias": {Phase.W}}  # nothing needs a gradient of its input
    assert phases == {name: {Phase.B} for name, _ in model.named_parameters()} | first


@pytest.mark.parametrize(
    ("build", "options"),
    [(Mixed, {}), (lambda: Mixed().bfloat16(), {"grad_dtype": torch.float32})],
    ids=["autocast", "grad_dtype"],
)
def test_a_device_with_the_op_adds_products_in_float32(build, options, monkeypatch):
    """As CUDA has it; no program that runs here."""
    monkeypatch.setattr(fuse_accumulation, "has_kernel", lambda op, device: True)
    found = accumulations(build(), **options)
    for name in ("first.weight", "last.weight"):
        node = found[name]
        assert node.target is aten.addmm.dtype_out
        assert node.kwargs == {"out_dtype": torch.float32, "out": node.args[0]}
        assert [n.meta["val"].dtype for n in node.all_input_nodes[1:]] == [torch.bfloat16] * 2
        assert node_flops(node) == 2 * ROWS * WIDTH * WIDTH
    assert found["first.bias"].target is aten.add_.Tensor


def test_a_cast_that_rounds_is_kept():
    """To a gradient of bfloat16 what autograd gives is added, and to one of float32 all its bits."""

    class Wide(Mixed):
        def forward(self, index):
            return (self.table(index).float() @ self.last.weight.float()).square().mean()

    narrow, wide = (accumulations(Wide().bfloat16(), grad_dtype=dtype) for dtype in (None, torch.float32))
    assert narrow["last.weight"].args[1].target is aten._to_copy.default
    assert wide["last.weight"].target is aten.addmm_.default
    assert [n.meta["val"].dtype for n in wide["last.weight"].all_input_nodes] == [torch.float32] * 3


def test_a_gradient_that_is_rounded_on_its_way_stays_rounded():
    """From float64 to float32 and back, as where a double model computes a part in float32."""

    class Rounded(Mixed):
        def forward(self, index):
            scale = self.first.bias.float().double()
            return (self.table(index) * scale).square().mean()

    model = Rounded().double()
    part = accumulations(model)["first.bias"].args[1]
    assert isinstance(part, fx.Node)
    assert part.target is aten._to_copy.default
    assert part.meta["val"].dtype == torch.float32


class Normed(nn.Module):
    """Layers with biases, a large bias, one that is used twice, and norms."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.norm, self.large = nn.LayerNorm(WIDTH), nn.Parameter(torch.rand(1 << 15))
        self.layers[3].bias = self.layers[2].bias

    def forward(self, x):
        for layer in self.layers:
            x = self.norm(torch.tanh(layer(x)))
        return x.square().mean() + (self.large.square() * x.mean()).mean()


def rows(count: int) -> tuple[torch.Tensor]:
    return (torch.randn(count, WIDTH),)


def test_small_gradients_of_a_stage_are_added_in_one_op(monkeypatch):
    torch.manual_seed(0)
    model, data = Normed().double(), (rows(6)[0].double(),)
    example = (data[0][:2],)

    def compiled() -> fxpipe.Pipeline:
        return fxpipe.compile(model, example, ranks=1, microbatches=3, schedule="zb-h1")

    joined = compiled()
    monkeypatch.setattr(accumulate_together, "LARGEST", 0)
    apart = compiled()
    source = joined.artifact.programs[0]
    assert source.count(" foreach_add_(") == 1
    assert 'add_(grads["large"]' in source
    assert "foreach_add_(" not in apart.artifact.programs[0]
    one, other = joined.run_local(data).grads, apart.run_local(data).grads
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


class OneGradientForTwo(nn.Module):
    """The gradient of the second bias is also that of ``m``, whose own it could be overwritten with."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x):
        m = torch.tanh(self.layers[0](x).mean(0))
        return (self.layers[1](x) + m).square().mean()


def test_a_gradient_that_waits_for_others_is_not_overwritten():
    torch.manual_seed(0)
    model, data = OneGradientForTwo().double(), (rows(6)[0].double(),)
    pipe = fxpipe.compile(model, (data[0][:2],), ranks=1, microbatches=3, schedule="1f1b")
    assert pipe.artifact.programs[0].count(" foreach_add_(") == 1
    found = pipe.run_local(data).grads
    (sum(model(x) for x in data[0].split(2)) / 3).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=0)


def test_weight_gradients_are_added_where_they_are_ready():
    """Each addition stands behind the last of its operands, before any op of the next layer."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    pipe = fxpipe.compile(
        model, rows(2), loss_fn=lambda y, _: y.square().sum(), ranks=1, microbatches=2, schedule="zb-h1"
    )
    assert pipe.graph is not None
    ops = [
        n.target.__name__
        for n in pipe.graph.nodes
        if n.op == "call_function" and n.meta["color"].phase == "W"
    ]
    assert ops == ["t.default", "addmm_.default"] * 3


def test_the_summands_of_one_accumulator_keep_their_order():
    """That of ``Outputs.grads``, whichever is ready first."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(op, (x,)) for op in (aten.sin.default, aten.cos.default))
    for node in graph.nodes:
        node.meta.update(val=torch.ones(2), origin=Origin(), color=Color(0, Phase.W))
    graph.output(Outputs(None, None, {}, {"w": (second, first)}, {}))
    fuse_accumulation.fuse_accumulation(graph)
    sums = graph.find_nodes(op="call_function", target=aten.add_.Tensor)
    assert [node.args[1] for node in sums] == [second, first]


def test_the_layers_of_a_model():
    """The outermost modules that have siblings with the same parameters, at least two of them."""
    block = ["norm.weight", "norm.bias", "mlp.up.bias", "mlp.down.bias"]
    names = [f"encoder.{k}.{name}" for k in range(2) for name in block]
    names += [f"decoder.h{k}.{name}" for k in range(2) for name in (*block, "cross.bias")]
    names += ["final.weight", "final.bias", "scale"]
    found = accumulate_together.layers(names)
    assert {found[name] for name in names} == {"encoder.0", "encoder.1", "decoder.h0", "decoder.h1", ""}
    assert all(name.startswith(layer) for name, layer in found.items())
    assert set(accumulate_together.layers([f"{k}.bias" for k in range(4)]).values()) == {""}


def test_small_gradients_are_added_layer_by_layer():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear(self.norm(x))

    model = nn.Sequential(*(Layer() for _ in range(3)))
    pipe = fxpipe.compile(
        model, rows(2), loss_fn=lambda y, _: y.square().sum(), ranks=1, microbatches=2, schedule="zb-h1"
    )
    assert pipe.graph is not None
    joined = pipe.graph.find_nodes(op="call_function", target=aten._foreach_add_.List)
    assert [node.meta["origin"].path for node in joined] == ["2", "1", "0"]
    assert [len(node.args[0]) for node in joined] == [3, 3, 3]
