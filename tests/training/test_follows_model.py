"""What the user does between compile and step: the step is that of the model as it is now, or an error."""

import numpy as np
import pytest
import torch
from equality import LIMIT, eager_step
from torch import nn
from zoo import relative_error, too_far

import fxpipe

WIDTH = 8


class Chain(nn.Module):
    """Halves an integer, which gives the default dtype, and keeps a running scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + torch.arange(WIDTH) / 3
        self.scale = self.scale * 0.9 + 0.1 * x.detach().mean(0)
        return (x * self.scale).square().mean()


def compiled(model: nn.Module, batch: torch.Tensor, **options) -> fxpipe.Pipeline:
    given = {"ranks": 2, "schedule": "zb-h1"} | options
    return fxpipe.compile(model, (batch[:2],), microbatches=3, **given)


def replace_parameter(model):
    model.layers[0].weight = nn.Parameter(torch.eye(WIDTH))


def replace_buffer(model):
    model.scale = torch.full((WIDTH,), 0.5)


def assign_state(model):
    model.load_state_dict({n: t * 0.5 for n, t in model.state_dict().items()}, assign=True)


def give_data(model):
    model.layers[1].weight.data = torch.eye(WIDTH)


def run_eager(model):
    model(torch.ones(4, WIDTH))  # replaces the buffer


CHANGES = [replace_parameter, replace_buffer, assign_state, give_data, run_eager]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_model_is_given_other_tensors(change, ranks):
    torch.manual_seed(0)
    model, batch = Chain(), torch.randn(6, WIDTH)
    pipe = compiled(model, batch, ranks=ranks)
    run = pipe.run_local if ranks > 1 else pipe.step
    run((batch,))
    change(model)
    model.zero_grad()
    expected = Chain()
    expected.load_state_dict(model.state_dict())
    loss, grads = eager_step(expected, (batch,), 3, None)
    result = run((batch,))
    found = result.grads if ranks > 1 else {n: p.grad for n, p in model.named_parameters()}
    assert relative_error(result.loss if ranks > 1 else result, loss) <= 1e-6
    assert too_far(found, grads, 1e-5) == {}
    assert relative_error(model.scale, expected.scale) <= 1e-6
    assert torch.equal(pipe.state_dict()["layers.0.weight"], model.layers[0].weight)


def test_the_model_is_converted():
    batch = torch.randn(6, WIDTH)
    model = Chain()
    pipe = compiled(model, batch)
    model.double()
    with pytest.raises(fxpipe.RunError, match=r"now torch.float64 of shape \(8, 8\)\. Compile the model"):
        pipe.run_local((batch,))


def test_the_model_is_moved():
    batch = torch.randn(6, WIDTH)
    model = Chain()
    pipe = compiled(model, batch)
    pipe.model_state.device = torch.device("cuda", 1)
    with pytest.raises(
        fxpipe.RunError, match=r"weight is on cpu, and the pipeline was compiled for cuda:1\. Move"
    ):
        pipe.run_local((batch,))


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_switched_on_around_a_step(ranks):
    torch.manual_seed(0)
    model, batch = Chain(), torch.randn(6, WIDTH)
    pipe = compiled(model, batch, ranks=ranks)
    run = pipe.run_local if ranks > 1 else pipe.step
    before = {n: b.clone() for n, b in model.named_buffers()}
    expected = run((batch,))
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.load_state_dict(before, strict=False)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            found = run((batch,))
    finally:
        torch.set_default_dtype(torch.float32)
    if ranks > 1:
        assert torch.equal(found.loss, expected.loss)
        assert all(torch.equal(g, expected.grads[n]) for n, g in found.grads.items())
    else:
        assert torch.equal(found, expected)
        assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters())
        run((batch,))  # its gradients are no tensors of inference mode


class Opaque:
    def __init__(self) -> None:
        self.x = torch.ones(2, WIDTH)

    def __repr__(self) -> str:
        return "Opaque()"


class WithMore(Chain):
    def forward(self, x, more):
        return super().forward(x)


@pytest.mark.parametrize("leaf", [np.ones((2, WIDTH)), Opaque()], ids=["numpy", "object"])
def test_a_batch_that_cannot_be_looked_into(leaf):
    with pytest.raises(fxpipe.BatchError, match=r"'1' is a .*, which fxpipe cannot look into"):
        fxpipe.compile(WithMore(), (torch.ones(2, WIDTH), leaf), ranks=2, microbatches=3, schedule="gpipe")


class Overwritten(nn.Module):
    """Operands that die in an op which reads them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        x = self.layers[0](x).exp()
        x = torch.addmm(x, x.new_ones(len(x), len(x)), x)
        x = self.layers[1](x).exp()
        x = x.masked_scatter(x.detach().roll(1) > 1, x)
        x = self.layers[2](x).exp()
        return x.index_copy(0, torch.arange(len(x) - 1, -1, -1), x)[0].square().mean()


def test_no_result_over_an_operand_that_is_read_twice():
    torch.manual_seed(0)
    model, batch = Overwritten().double(), torch.randn(6, WIDTH, dtype=torch.float64) * 0.1
    loss, grads = eager_step(model, (batch,), 3, None)
    result = compiled(model, batch, recompute="full").run_local((batch,))
    assert relative_error(result.loss, loss) <= LIMIT
    assert too_far(result.grads, grads, LIMIT) == {}
    forward = compiled(model, batch, gradients=False).run_local((batch,))
    assert relative_error(forward.loss, loss) <= LIMIT


def test_settings_that_change():
    model, batch = Chain(), torch.randn(6, WIDTH)
    model.layers[1].rate = 0.5
    pipe = compiled(model, batch)
    loss = pipe.run_local((batch,)).loss
    model.eval()
    model.layers[1].rate = float("0.5")
    pipe.run_local((batch,))  # no warning
    model.layers[1].rate = 0.1
    with pytest.warns(
        UserWarning, match=r"layers\.1\.rate was 0\.5 when it was compiled, and is 0\.1: .*with 0\.5"
    ):
        pipe.run_local((batch,))
    model.layers[1].rate = 0.2
    assert pipe.run_local((batch,)).loss != loss, "as the buffer goes on; no second warning"
