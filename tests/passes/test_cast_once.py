"""Parameters that products take in bfloat16 are cast once a step, by each rank that uses them."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo import LENGTH, WORDS, Case, Shape, built_and_compiled, eager, relative_error, tokens, too_far

import fxpipe
from fxpipe.errors import LimitError
from fxpipe.ir.casts import Cast, cast_of, parameter_of
from fxpipe.ir.graph import Kind, Value

WIDTH, MICROBATCHES = 16, 3
# Both round to bfloat16, of eight bits, in the same places; a split vocabulary also sums in other places.
ROUNDED = 2**-6


class Mixed(nn.Module):
    """A tied table, and a layer that is used at the beginning and at the end."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.run = partial(checkpoint, use_reentrant=False) if again else lambda inner, *given: inner(*given)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids, labels):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.table(ids)
            for layer in (*self.layers, self.layers[0]):
                x = x + self.run(self.inner, layer, x)
            logits = self.head(x)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    @staticmethod
    def inner(layer, x):
        return torch.tanh(layer(x))


MIXED, AGAIN = Case(Mixed, tokens), Case(lambda: Mixed(True), tokens)
SHAPES = {
    "one rank": (MIXED, Shape(1)),
    "three ranks": (MIXED, Shape(3, "zb-h1")),
    "checkpointed": (AGAIN, Shape(2, "1f1b", 2)),
    "vocabulary": (MIXED, Shape(2, "1f1b", vocab_parallel=True)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_those_of_autocast(name):
    case, shape = SHAPES[name]
    model, pipe = built_and_compiled(case, MICROBATCHES, shape)
    batch = case.data(MICROBATCHES)
    expected = eager(model, batch, MICROBATCHES)
    result = pipe.run_local(batch, measure_memory=True)
    assert relative_error(result.loss, expected.loss) <= ROUNDED
    assert too_far(result.grads, expected.grads, ROUNDED) == {}
    # Casts are no saved activations, neither planned nor real; losses and labels of shards are few bytes.
    assert pipe.simulate().peak_memory == pytest.approx(result.peak_saved, rel=0.1)
    cast = {
        name for s in pipe.sections for v in s.inputs if v.kind is Kind.CAST and (name := parameter_of(v))
    }
    assert {f"layers.{k}.weight" for k in range(4)} <= cast
    for rank, program in enumerate(pipe.artifact.programs):
        held = pipe.plan.tensors[rank].parameters
        for value in {v for s in pipe.sections if pipe.plan.placement[s.stage] == rank for v in s.inputs}:
            if value.kind is Kind.CAST:
                assert parameter_of(value) in held
                assert program.count(f'"{value.name}": (') == 1
        assert program.count("rt.cast_parameters(CASTS)") == 1
        assert 'to_copy(params["' not in program


def test_each_step_casts_what_the_optimizer_made():
    model, pipe = built_and_compiled(MIXED, MICROBATCHES, Shape(1))
    plain = copy.deepcopy(model)
    ours = pipe.optimizer(torch.optim.SGD, lr=0.5)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    losses = []
    for seed in range(3):
        torch.manual_seed(seed)
        batch = MIXED.batch(MIXED.rows * MICROBATCHES)
        losses.append(pipe.step(batch))
        ours.step()
        ours.zero_grad()
        found = eager(plain, batch, MICROBATCHES)
        assert relative_error(losses[-1], found.loss) <= ROUNDED
        for name, parameter in plain.named_parameters():
            parameter.grad = found.grads[name]
        theirs.step()
    assert len({float(loss) for loss in losses}) == 3


def test_an_evaluation_casts_for_itself():
    model = Mixed()
    pipe = fxpipe.compile(model, MIXED.example(), ranks=2, microbatches=2, schedule="1f1b", evaluation=True)
    batch = MIXED.data(2)
    assert pipe.evaluation is not None
    assert pipe.evaluation.run_local(batch).loss == pipe.run_local(batch).loss
    assert all("CASTS" in program for program in pipe.evaluation.artifact.programs)


def test_an_output_that_is_a_cast_is_given():
    class Shown(Mixed):
        def forward(self, ids, labels):
            return {"loss": super().forward(ids, labels), "weight": self.layers[0].weight.bfloat16()}

    model = Shown()
    given = {"ranks": 2, "microbatches": 2, "schedule": "1f1b", "outputs": ["weight"]}
    pipe = fxpipe.compile(model, MIXED.example(), **given)
    found = pipe.run_local(MIXED.data(2), outputs=["weight"]).outputs["weight"]
    assert torch.equal(found[:WIDTH], model.layers[0].weight.detach().bfloat16())


def test_a_cast_to_more_bits_stays_in_its_section():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8).bfloat16()

        def forward(self, x):
            return F.linear(x, self.layer.weight.float()).square().mean()

    pipe = fxpipe.compile(Wide(), (torch.ones(2, 8),), ranks=1, microbatches=2, schedule="1f1b")
    assert "CASTS" not in pipe.artifact.programs[0]


def test_the_memory_limit_counts_casts():
    model = Mixed()
    casts = (
        sum(layer.weight.numel() + layer.bias.numel() for layer in model.layers) + model.head.weight.numel()
    )
    with pytest.raises(LimitError) as raised:
        fxpipe.compile(model, MIXED.example(), ranks=1, microbatches=2, memory_limit=1)
    assert raised.value.smallest == 2 * sum(p.nbytes for p in model.parameters()) + 2 * casts


@pytest.mark.slow
def test_costs_at_other_lengths():
    given = {"ranks": 2, "microbatches": 2, "schedule": "1f1b", "dimensions": {"sequence": LENGTH}}
    pipe = fxpipe.compile(Mixed(), MIXED.example(), **given)
    sizes = [pipe.simulate({"sequence": k * LENGTH}).peak_memory[0] for k in (1, 2, 3)]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0


@pytest.mark.parametrize("name", ["a.weight", "x as y", "head.weight[0:16]", " as "])
def test_names_of_casts(name):
    cast = Cast(name, torch.bfloat16)
    assert cast_of(str(cast)) == cast
    assert parameter_of(Value(Kind.CAST, str(cast))) == name
