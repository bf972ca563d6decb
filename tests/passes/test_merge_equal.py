"""What a section computes once, and where it stands."""

import itertools

import torch
from torch import nn

import fxpipe
from fxpipe.ir.storage import call_nodes

aten = torch.ops.aten
WIDTH = 4


class Rotary(nn.Module):
    """Each layer makes the same table and the same mask, and draws its own numbers."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])

    def forward(self, first):
        x = first
        for layer in self.layers:
            table, mask = first.exp().cos(), first.triu(1) > 0
            x = nn.functional.dropout(layer(x) * table, 0.5).masked_fill(mask, 0.0)
        return x.square().mean()


def compiled(model: nn.Module | None = None, **options) -> fxpipe.Pipeline:
    given = {"ranks": 1, "microbatches": 2, "schedule": "zb-h1"}
    return fxpipe.compile(model or Rotary(), (torch.ones(WIDTH, WIDTH),), **given | options)


def ops(pipe: fxpipe.Pipeline, phase: str, path: str | None = None) -> list[str]:
    assert pipe.graph is not None
    nodes = [n for n in call_nodes(pipe.graph) if n.meta["color"].phase == phase]
    return [getattr(n.target, "__name__", "") for n in nodes if path in (None, n.meta["origin"].path)]


def test_layers_share_their_tables_and_masks():
    forward = ops(compiled(), "F")
    for op in ("exp.default", "cos.out", "triu.default", "gt.Scalar"):
        assert forward.count(op) == 1, forward


class Layer(nn.Linear):
    """Makes its table behind its product."""

    def forward(self, x, first):
        return super().forward(x) * first.exp().cos()


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, first):
        x = first
        for layer in self.layers:
            x = layer(x, first)
        return x.square().mean()


def test_what_layers_share_stands_before_the_first_of_them():
    forward = ops(compiled(Late()), "F")
    assert forward.count("exp.default") == 1
    assert forward.index("exp.default") < next(k for k, op in enumerate(forward) if "addmm" in op)


def test_random_numbers_are_each_drawn():
    assert ops(compiled(), "F").count("keyed") == 3


class OneNormThrice(nn.Module):
    """Twice in the first stage, where the gradients of its parameters are equal, and once in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x):
        return self.norm(self.layers(self.norm(x) + self.norm(x))).exp().mean()


def test_equal_gradients_that_one_op_returns_are_each_added():
    torch.manual_seed(0)
    model, data = OneNormThrice(), torch.randn(2 * WIDTH, WIDTH)
    found = compiled(model, ranks=2, split_points=["layers.2"]).run_local((data,)).grads
    (sum(map(model, data.split(WIDTH))) / 2).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_shared_values_stand_before_the_layers():
    """So the first layer has the ops of the others."""
    pipe = compiled()
    assert pipe.graph is not None
    forward = [n for n in call_nodes(pipe.graph) if n.meta["color"].phase == "F"]
    assert forward[0].target is aten.exp.default
    begins = next(k for k, n in enumerate(forward) if n.target is aten.t.default)
    products = [k for k, n in enumerate(forward) if n.target is aten.addmm.default]
    layers = [[n.target for n in forward[a - 1 : b - 1]] for a, b in itertools.pairwise(products)]
    assert begins == products[0] - 1
    assert layers[0] == layers[1]


def test_values_that_are_equal_at_one_size_stay_apart():
    """Two tables of four entries: one an entry a position, the other always four."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            position, always = torch.arange(x.shape[1]).float(), torch.arange(WIDTH).float()
            return (self.weight * x * position.cos().sum() * always.cos().sum()).mean()

    for dimensions, tables in ((None, 1), ({"sequence": WIDTH}, 2)):
        example = (torch.ones(2, WIDTH),)
        pipe = fxpipe.compile(
            Tables(), example, ranks=1, microbatches=2, schedule="zb-h1", dimensions=dimensions
        )
        assert pipe.artifact.programs[0].count(" arange(") == tables
