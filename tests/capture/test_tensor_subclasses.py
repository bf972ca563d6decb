"""Tensors that are made of others, as torchao's are of numbers of few bits and their scales: a program has
the ops on their parts."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zoo import eager, relative_error, too_far

import fxpipe

WIDTH, ROWS, MICROBATCHES = 16, 4, 3


class Scaled(torch.Tensor):
    """Numbers of eight bits, and the number that they were divided by."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data, scale):
        self.data8, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts, meta, size, stride):
        return Scaled(parts["data8"], parts["scale"])

    @classmethod
    def of(cls, x):
        scale = x.abs().max() / 448
        return cls((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.t.default, torch.ops.aten.detach.default):
            return cls(func(args[0].data8), args[0].scale)
        assert func is torch.ops.aten.mm.default, f"{func} is not supported"
        a, b = args
        return (a.data8.to(a.dtype) @ b.data8.to(b.dtype)) * (a.scale * b.scale)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.mm(Scaled.of(x), Scaled.of(weight).t())

    @staticmethod
    def backward(ctx, d):
        x, weight = ctx.saved_tensors
        return torch.mm(Scaled.of(d), Scaled.of(weight)), torch.mm(Scaled.of(d).t(), Scaled.of(x))


class FewBits(nn.Module):
    """A layer whose products are of numbers of eight bits."""

    product = staticmethod(Product.apply)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x):
        return x + torch.tanh(self.product(x, self.weight))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([FewBits() for _ in range(4)])

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


def data(rows):
    return {"x": torch.randn(rows, WIDTH), "y": torch.randn(rows, WIDTH)}


def test_products_of_tensors_that_are_made_of_others():
    torch.manual_seed(0)
    model, batch = Model(), data(ROWS * MICROBATCHES)
    example = {name: x[:ROWS] for name, x in batch.items()}
    pipe = fxpipe.compile(
        model, example, ranks=2, microbatches=MICROBATCHES, schedule="zb-h1", mean="microbatch"
    )
    expected, result = eager(model, batch, MICROBATCHES), pipe.run_local(batch)
    assert relative_error(result.loss, expected.loss) < 1e-6
    assert too_far(result.grads, expected.grads, 1e-6) == {}
    assert pipe.check().holds
    assert all("float8_e4m3fn" in program for program in pipe.artifact.programs)
    # The numbers count that were rounded to eight bits: others give gradients that differ by a few percent.
    plain = copy.deepcopy(model)
    for layer in plain.layers:
        layer.product = F.linear
    assert too_far(result.grads, eager(plain, batch, MICROBATCHES).grads, 1e-3) != {}


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_registered_one(kind):
    model = Model()
    scaled = Scaled.of(torch.randn(WIDTH, WIDTH))
    if kind == "buffer":
        model.register_buffer("table", scaled)
    else:
        model.table = nn.Parameter(scaled, requires_grad=False)
        model.other = nn.Parameter(scaled, requires_grad=False)  # neither has memory of its own
    with pytest.raises(fxpipe.CaptureError, match=r"'table' is a Scaled, .* \(data8, scale\)\. Register"):
        fxpipe.compile(model, data(ROWS), ranks=2, microbatches=2)


class KeepsScaled(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["exp_avg"] = Scaled.of(p.detach())


def test_an_optimizer_that_keeps_them(tmp_path):
    """A checkpoint tells so: its files have none."""
    pipe = fxpipe.compile(Model(), data(ROWS), ranks=1, microbatches=2, schedule="1f1b", mean="microbatch")
    optimizer = pipe.optimizer(KeepsScaled, lr=0.1)
    pipe.step(data(2 * ROWS))
    optimizer.step()
    with pytest.raises(
        fxpipe.RunError, match=r"keeps 'exp_avg' of layers.0.weight as a Scaled, which is made"
    ):
        fxpipe.Checkpointer(pipe, tmp_path, optimizer=optimizer).save()
