"""Layers that repeat are written once, and the step is the same bit for bit."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import slow_except
from torch import nn
from zoo import CASES

import fxpipe
from fxpipe.codegen.layers import outline, repeats
from fxpipe.codegen.layers.sequences import loop_head
from fxpipe.ir.graph import Origin
from fxpipe.ir.storage import call_nodes

WIDTH = 8


class Block(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.rate = rate

    def forward(self, x):
        return x + (1 - self.rate) * self.outer(F.gelu(self.inner(self.norm(x))))


class Layers(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(8)])

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


class Noisy(Layers):
    """Each block draws random numbers at a position of its own."""

    def forward(self, x, y):
        for block in self.blocks:
            x = F.dropout(block(x), 0.5)
        return F.mse_loss(x, y)


class Counted(Layers):
    """A number that advances as the position of the random op does."""

    def forward(self, x, y):
        for number, block in enumerate(self.blocks):
            x = F.dropout(block(x) + float(number), 0.5)
        return F.mse_loss(x, y)


class Hooked(Block):
    def forward(self, x):
        hidden = F.gelu(self.inner(self.norm(x)))
        result = self.outer(hidden)
        for value in (hidden, result):
            value.register_hook(lambda grad: grad * 3)
        return x + 1.0 * result


class Bare(nn.Module):
    """The layers have parameters, and no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ParameterList(torch.randn(WIDTH, 12) / 3 for _ in range(8))
        self.outer = nn.ParameterList(torch.randn(12, WIDTH) / 3 for _ in range(8))

    def forward(self, x, y):
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = x + F.gelu(F.layer_norm(x, (WIDTH,)) @ inner) @ outer
        return F.mse_loss(x, y)


def interrupted():
    """The forward of all blocks is alike, and the backward of one in the middle like no other."""
    return Layers(*[Hooked() if k == 4 else Block() for k in range(9)])


class Halves(nn.Module):
    """A layer that is a list of two modules, as those of T5 are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Block(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())])

    def forward(self, x):
        return self.layer[1](self.layer[0](x))


class Balanced(Layers):
    """Each block has a part in the loss, as layers of experts have."""

    def forward(self, x, y):
        parts = []
        for block in self.blocks:
            x = block(x)
            parts.append(x.abs().mean())
        return F.mse_loss(x, y) + torch.stack(parts).sum()


class OwnAtTheEnd(Layers):
    """All blocks but the last multiply with a value from before them, and that with one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x, y):
        others = [y.exp(), y.sin(), y.cos(), y.tanh(), y.sigmoid(), y.square(), y.neg()]
        for block, other in zip(self.blocks, [*others, None], strict=True):
            x = block(x)
            x = torch.stack([x, x if other is None else other]).prod(0)
        return F.mse_loss(self.last(x), y)


class Named(Layers):
    """Modules with names that an f-string must not evaluate."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f'{{x}}"{k}"': Block() for k in range(8)})

    def forward(self, x, y):
        for block in self.blocks.values():
            x = block(x)
        return F.mse_loss(x, y)


def compiled(model, **options):
    torch.manual_seed(0)
    example = {"x": torch.randn(2, WIDTH), "y": torch.randn(2, WIDTH)}
    options = {"ranks": 2, "microbatches": 2, "schedule": "zb-h1"} | options
    return fxpipe.compile(model(), example, **options)


def run(pipe):
    torch.manual_seed(1)
    return pipe.run_local({"x": torch.randn(4, WIDTH), "y": torch.randn(4, WIDTH)}, measure_memory=True)


def written_out(monkeypatch):
    for module in (repeats, outline):
        monkeypatch.setattr(module, "FEWEST", 10**9)


STEPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (Layers, {}),
    "recompute": (Layers, {"schedule": "1f1b", "recompute": "full"}),
    "offload": (Layers, {"schedule": "gpipe", "offload": fxpipe.Offload(bandwidth=1e12)}),
    "random": (Noisy, {}),
    "numbers": (Counted, {}),
    "interrupted": (interrupted, {"ranks": 1}),
    "losses": (Balanced, {}),
    "own": (OwnAtTheEnd, {"ranks": 1}),
    "names": (Named, {}),
    "bare": (Bare, {}),
    "rates": (lambda: Layers(*map(Block, (0.1, 0.3, 0.2, 0.5, 0.7, 0.2, 0.4, 0.6))), {}),
}


#: Whose programs others have as well: the goldens, and tests/passes.
VARIATIONS = ("plain", "recompute", "offload", "numbers", "names")


@pytest.mark.in_ci("random")
@pytest.mark.parametrize("name", slow_except(STEPS, "random", "bare", variations=VARIATIONS))
def test_a_step_is_the_same(monkeypatch, name):
    model, options = STEPS[name]
    monkeypatch.setattr(fxpipe.ir.liveness, "SMALLEST", 1)
    pipe = compiled(model, **options)
    assert all(re.search(r"\n    for i in ", program) for program in pipe.artifact.programs)
    found = run(pipe)
    written_out(monkeypatch)
    whole = compiled(model, **options)
    assert not any("\n    for i in " in program for program in whole.artifact.programs)
    expected = run(whole)
    assert torch.equal(found.loss, expected.loss)
    assert found.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        assert torch.equal(found.grads[name], grad), name
    assert found.peak_saved == expected.peak_saved


@pytest.mark.in_ci("reversible")
@pytest.mark.parametrize(
    "name",
    slow_except(
        ["reversible", "integer_crossing", "checkpointed_reentrant", "multi_output"], "integer_crossing"
    ),
)
def test_runs_with_other_uses_of_their_values(monkeypatch, name):
    """With a threshold at which short runs become loops, too."""
    for module in (repeats, outline):
        monkeypatch.setattr(module, "FEWEST", 4)
    case, results = CASES[name], []
    for _ in range(2):
        pipe = fxpipe.compile(
            case.build(), case.example(), loss_fn=case.loss_fn, ranks=2, microbatches=2, schedule="zb-h1"
        )
        results.append(pipe.run_local(case.data(2)))
        written_out(monkeypatch)
    found, expected = results
    assert torch.equal(found.loss, expected.loss)
    assert all(torch.equal(found.grads[name], expected.grads[name]) for name in expected.grads)


def test_a_graph_in_which_nothing_repeats_has_no_loop():
    programs = compiled(lambda: Layers(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))).artifact.programs
    assert not any("\n    for i in " in program for program in programs)


def test_a_layer_that_is_a_list_is_the_module_of_its_function():
    (program,) = compiled(lambda: Layers(*[Halves() for _ in range(6)]), ranks=1).artifact.programs
    assert re.findall(r"def (\w+)", program)[:3] == ["blocks_forward", "blocks_backward", "blocks_weight"]
    forward = program[program.index("def blocks_forward(") : program.index("def blocks_backward(")]
    assert re.findall(r"# (\.\S+)", forward)[:2] == [".layer.0.norm", ".layer.0.inner"]
    assert 'layer_0_inner_addmm = addmm(params["layer.0.inner.bias"], layer_0_norm_' in forward
    assert 'layer_1_0_addmm = addmm(params["layer.1.0.bias"], ' in forward


def test_a_module_with_a_number_for_a_name_has_a_readable_one_in_its_layer():
    model = Layers(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(6)]
    )
    (program,) = compiled(lambda: model, ranks=1).artifact.programs
    assert 'blocks_0_addmm = addmm(params["0.bias"], blocks_in, ' in program
    assert not re.search(r"\b(d)?_\d", program)


@pytest.mark.parametrize(
    ("values", "head", "texts"),
    [
        ({}, "for _ in range(3):", {}),
        ({"at": ["b.2", "b.3", "b.4"]}, "for i in range(2, 5):", {"at": 'f"b.{i}"'}),
        ({"at": ["b.4", "b.3", "b.2"]}, "for i in range(4, 1, -1):", {"at": 'f"b.{i}"'}),
        (
            {"at": ["b.1.c", "b.2.c", "b.3.c"], "position": [4, 7, 10]},
            "for i in range(1, 4):",
            {"at": 'f"b.{i}.c"', "position": "3 * i + 1"},
        ),
        ({"at": ["b.01", "b.02", "b.03"]}, 'for at in ("b.01", "b.02", "b.03"):', {"at": "at"}),
        (
            {"at": ["a", "b", "c"], "rate": [0.1, float("inf"), 0.2]},
            'for at, rate in (("a", 0.1), ("b", float("inf")), ("c", 0.2)):',
            {"at": "at", "rate": "rate"},
        ),
        ({"at": ['{"1', '{"2', '{"3']}, "for i in range(1, 4):", {"at": 'f"{{\\"{i}"'}),
    ],
)
def test_heads_of_loops(values, head, texts):
    assert loop_head(3, values) == (head, texts)


@pytest.mark.variation
@pytest.mark.slow
def test_lines_do_not_grow_with_the_number_of_layers():
    def lines(layers):
        program = compiled(lambda: Layers(*[Block() for _ in range(layers)])).artifact.programs[0]
        return program.count("\n")

    assert lines(24) <= lines(12) + 10


@pytest.mark.variation
@pytest.mark.slow
def test_layers_that_the_backward_repeats():
    """What the repeated forward of a layer gives to its backward is one record, in the same section."""
    options = {"ranks": 1, "schedule": "1f1b", "recompute": "full"}
    (program,) = compiled(lambda: Layers(*(Block() for _ in range(12))), **options).artifact.programs
    backward = program[program.index("def stage0_backward(") : program.index("def step(")]
    repeated = re.search(
        r"collected_blocks = \[\]\n    for i in range\(0, 12\):\n.*= blocks_forward_2\(", backward
    )
    taken = re.search(
        r"for i in range\(11, 0, -1\):\n.*= blocks_backward\(\n.*collected_blocks\.pop\(\)\)", backward
    )
    assert repeated is not None
    assert taken is not None
    assert repeated.end() < taken.start()
    (longer,) = compiled(lambda: Layers(*(Block() for _ in range(24))), **options).artifact.programs
    assert len(longer.splitlines()) <= len(program.splitlines()) + 6  # lines of buckets


@pytest.mark.slow
def test_a_backward_repeats_all_layers_but_the_last():
    """The last layer of a stage is repeated without its end, behind the loop, and takes what that carries."""

    def program(depth):
        options = {"schedule": "1f1b", "recompute": "full", "split_points": [f"blocks.{depth}"]}
        return compiled(lambda: Noisy(*(Block(0.1) for _ in range(2 * depth))), **options).artifact.programs[
            0
        ]

    shorter, longer = program(6), program(12)
    assert re.search(r"for i in range\(5, 0, -1\):\n.*\n.*\n *collected_blocks_2\.pop\(\)\)", shorter)
    assert len(longer.splitlines()) <= len(shorter.splitlines()) + 4  # lines of buckets


def test_stages_of_a_rank_share_the_functions_of_their_layers():
    """Also where the model itself draws random numbers, as its ops have other numbers in each stage."""
    program = compiled(lambda: Noisy(*[Block() for _ in range(16)]), schedule="zb-v").artifact.programs[1]
    assert re.findall(r"def (blocks\w+)", program) == ["blocks_forward", "blocks_backward", "blocks_weight"]
    assert [program.count(f" {name}(") for name in ("blocks_forward", "blocks_backward")] == [3, 3]


def test_a_long_chain_of_equal_ops_is_looked_at_in_a_time_that_grows_with_it():
    """It has a run for each position and period, and none may be one that can be written as calls."""
    looks = {}
    for length in (100, 200):
        graph = torch.fx.Graph()
        last = graph.placeholder("x")
        last.meta["val"] = torch.empty(2, device="meta")
        for _ in range(length):
            last = graph.call_function(torch.ops.aten.tanh.default, (last,))
            last.meta.update(val=torch.empty(2, device="meta"), origin=Origin())
        looked = []

        def none(run, looked=looked):
            looked.append(run.end - run.begin)
            return 0

        assert repeats.repeats(call_nodes(graph), none) == []
        looks[length] = sum(looked)
    assert 0 < looks[200] <= 2.1 * looks[100]


class Streams(nn.Module):
    """Layers with two streams, of which each reads the other."""

    def __init__(self) -> None:
        super().__init__()
        layer = {"inner": nn.Linear(6, WIDTH), "outer": nn.Linear(WIDTH, 6)}
        self.blocks = nn.ModuleList(nn.ModuleDict(copy.deepcopy(layer)) for _ in range(8))

    def forward(self, x, y):
        other = x[:, :6]
        for block in self.blocks:
            x = x + block["inner"](other).tanh()
            other = other + block["outer"](x).tanh()
        return F.mse_loss(x, y) + other.sum()


def test_gradients_of_layers_have_the_names_of_their_values():
    """Also of several carried ones: d_blocks_in_2 is the gradient of blocks_in_2."""
    batch = {"x": torch.randn(2, WIDTH), "y": torch.randn(2, WIDTH)}
    model = Streams()
    options = {"ranks": 1, "microbatches": 1, "schedule": "zb-h1"}
    (program,) = fxpipe.compile(model, batch, **options).artifact.programs
    forward, backward = (
        re.search(rf"^def blocks_{phase}\(.*?(?=^def )", program, re.DOTALL | re.MULTILINE).group()
        for phase in ("forward", "backward")
    )
    assert dict(re.findall(r"# (\w+): f32\[2, (\d)\]", forward)) == {"blocks_in": "6", "blocks_in_2": "8"}
    assert "return model_add_2, model_add," in forward
    assert "model_add_2 = add(blocks_in, " in forward
    assert dict(re.findall(r"# (\w+): f32\[2, (\d)\]", backward)) == {
        "d_model_add_2": "6",
        "d_model_add": "8",
    }
    assert "d_blocks_in = add_out(d_model_add_2, d_blocks_in_via_inner," in backward
    assert "d_blocks_in_2 = add_out(d_model_add, d_blocks_in_2_via_outer," in backward
    assert 'd_blocks_in_via_inner = mm(d_inner_addmm, params["inner.weight"])' in backward
    assert "return [d_blocks_in, d_blocks_in_2]," in backward
