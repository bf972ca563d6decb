"""What no microbatch changes is computed once a step, by each rank that uses it: tables, casts of weights."""

import copy
import re
from functools import partial

import pytest
import torch
import zoo
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from zoo import (
    LENGTH,
    WORDS,
    Case,
    Shape,
    built_and_compiled,
    check_against_eager,
    eager,
    in_double_precision,
    numbers,
    relative_error,
    tokens,
    too_far,
)

import fxpipe
from fxpipe.errors import LimitError
from fxpipe.ir.graph import Kind
from fxpipe.plan.memory import rank_memory

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


@pytest.mark.in_ci("three ranks", "vocabulary")
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
    once = {v for s in pipe.sections for v in s.inputs if v.kind is Kind.ONCE}
    assert {f"layers.{k}.weight" for k in range(4)} <= {x.name for v in once for x in v.computed_from}
    for rank, program in enumerate(pipe.artifact.programs):
        held = pipe.plan.tensors[rank].parameters
        for value in {v for s in pipe.sections if pipe.plan.placement[s.stage] == rank for v in s.inputs}:
            if value.kind is Kind.ONCE:
                assert {x.name for x in value.computed_from} <= {*held, "labels"}  # which it counts
        assert program.count("rt.once(once_a_step, params)") == 1
        casts = "".join(re.findall(r"def once_a_step.*?return once", program, re.DOTALL))
        assert program.count("to_copy(params[") == casts.count("to_copy(params[") > 0


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
    assert all(" as bfloat16" in program for program in pipe.evaluation.artifact.programs)


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
    assert " as float32" not in pipe.artifact.programs[0]


def test_the_memory_limit_counts_casts():
    model = Mixed()
    casts = (
        sum(layer.weight.numel() + layer.bias.numel() for layer in model.layers) + model.head.weight.numel()
    )
    with pytest.raises(LimitError) as raised:
        fxpipe.compile(model, MIXED.example(), ranks=1, microbatches=2, memory_limit=1)
    count = 4  # of labels
    assert raised.value.smallest == 2 * sum(p.nbytes for p in model.parameters()) + 2 * casts + count


@pytest.mark.variation
@pytest.mark.slow
def test_costs_at_other_lengths():
    given = {"ranks": 2, "microbatches": 2, "schedule": "1f1b", "dimensions": {"sequence": LENGTH}}
    pipe = fxpipe.compile(Mixed(), MIXED.example(), **given)
    sizes = [pipe.simulate({"sequence": k * LENGTH}).peak_memory[0] for k in (1, 2, 3)]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0


class Turned(nn.Module):
    """Layers that share a table made of a buffer, each with a mask of its own, which are equal; the first
    drops some of the table, and the last counts its calls."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(zoo.WIDTH, zoo.WIDTH) for _ in range(4)])
        self.register_buffer("rates", torch.rand(zoo.WIDTH))
        self.register_buffer("calls", torch.zeros(zoo.WIDTH))
        self.drop = drop

    def forward(self, x, y):
        turned = torch.outer(torch.arange(3), self.rates).cos()
        x = x + F.dropout(turned[2], self.drop)
        for layer in self.layers:
            mask = torch.ones(zoo.WIDTH, zoo.WIDTH, dtype=torch.bool).tril()
            x = torch.tanh(F.linear(x, layer.weight.where(mask, 0.0), layer.bias)) * turned[1]
        self.calls += 1
        return (x * self.calls.reciprocal() - y).square().mean()


TURNED, DROPPED = Case(Turned, numbers), Case(lambda: Turned(0.5), numbers)


def once_of(pipe):
    """The function of each program that computes what no microbatch changes; "" where there is none."""
    found = (re.search(r"def once_a_step.*?return once\n", p, re.DOTALL) for p in pipe.artifact.programs)
    return [match.group() if match else "" for match in found]


class Rounded(nn.Module):
    """Weights of few bits, with gradients of the whole ones; a table of a parameter that all layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(zoo.WIDTH, zoo.WIDTH) for _ in range(8)])
        self.table = nn.Parameter(torch.randn(zoo.WIDTH, zoo.WIDTH))

    def forward(self, x, y):
        # As large as the parameter, and read in several stages.
        turn = self.table.tanh()
        for layer in self.layers:
            # Of the weight, and of what the loop over the layers finds made.
            scale = (torch.eye(zoo.WIDTH) @ layer.weight.abs()).amax(1, keepdim=True) / 7
            rounded = (layer.weight / scale).round() * scale
            x = torch.tanh(F.linear(x, layer.weight + (rounded - layer.weight).detach(), layer.bias)) @ turn
        return (x - y).square().mean()


ROUNDED_WEIGHTS = Case(Rounded, numbers)


@pytest.mark.parametrize("shape", [Shape(2, "zb-h1"), Shape(2, "1f1b", 2)])
def test_gradients_with_rounded_weights_are_those_of_eager(shape):
    with in_double_precision():
        check_against_eager(ROUNDED_WEIGHTS, MICROBATCHES, shape)


def test_rounded_weights_are_computed_once():
    with in_double_precision():
        model, pipe = built_and_compiled(ROUNDED_WEIGHTS, MICROBATCHES, Shape(2, "zb-h1"))
        given = {"ranks": 2, "microbatches": MICROBATCHES, "schedule": "zb-h1"}
        without = fxpipe.compile(model, ROUNDED_WEIGHTS.example(), **given, without=["weights-once"])
        batch = ROUNDED_WEIGHTS.data(MICROBATCHES)
        result = pipe.run_local(batch, measure_memory=True)
        assert torch.equal(result.loss, without.run_local(batch).loss)
    assert pipe.simulate().peak_memory == pytest.approx(result.peak_saved, rel=0.1)
    assert pipe.check().holds
    for program, own in zip(pipe.artifact.programs, once_of(pipe), strict=True):
        assert own.count(" round(") == 1 == program.count(" round("), "in a loop over the layers"
        assert "table" not in own
    assert not re.search("round|amax", "".join(once_of(without)))
    rule = next(each for each in pipe.plan.rewrites if each.rule == "weights-once")
    assert rule.ops == 7 * 10  # but of the first layer, whose backward reads no weight
    assert rule.seconds > 0
    assert all(each.rule != "weights-once" for each in without.plan.rewrites)


def test_each_step_rounds_what_the_optimizer_made():
    model, pipe = built_and_compiled(ROUNDED_WEIGHTS, MICROBATCHES, Shape(1))
    plain, batch = copy.deepcopy(model), ROUNDED_WEIGHTS.data(MICROBATCHES)
    ours, theirs = pipe.optimizer(torch.optim.SGD, lr=0.5), torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(3):
        loss = pipe.step(batch)
        ours.step()
        ours.zero_grad()
        expected = eager(plain, batch, MICROBATCHES)
        assert relative_error(loss, expected.loss) < 1e-5
        for name, parameter in plain.named_parameters():
            parameter.grad = expected.grads[name]
        theirs.step()


def test_a_memory_limit_that_leaves_no_room_for_them():
    """As many rows as make the weights cheap beside products, which then make them again in the backward."""
    with torch.device("meta"):
        model = nn.Sequential(*(weight_norm(nn.Linear(2048, 2048)) for _ in range(8)))
        x = torch.ones(1 << 16, 2048)
    given = {"ranks": 2, "microbatches": 2, "schedule": "1f1b", "costs": "H100", "check": False}
    given["loss_fn"] = lambda y, batch: y.square().mean()

    def compiled(**options):
        pipe = fxpipe.compile(model, (x,), **given, **options)
        return pipe, max(rank.peak for rank in rank_memory(pipe.plan, pipe.plan.prediction.peak_memory))

    whole, most = compiled()
    _, least = compiled(without=["weights-once"])
    within, peak = compiled(memory_limit=least)
    assert peak <= least < most
    assert "weights-once" in {each.rule for each in whole.plan.rewrites}
    assert "weights-once" not in {each.rule for each in within.plan.rewrites}
    with pytest.raises(LimitError):
        compiled(memory_limit=least // 2)


def test_what_is_no_smaller_and_one_direction_needs_is_not_held():
    class Shown(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            weight = self.layer.weight
            more = (x @ weight.detach().exp()).detach() + weight.detach().norm()
            return (self.layer(x) + more).square().mean()

    pipe = fxpipe.compile(Shown(), (torch.ones(2, 8),), ranks=1, microbatches=2, schedule="1f1b")
    own = once_of(pipe)[0]
    assert "linalg_vector_norm(" in own
    assert "exp(" not in own


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_with_tables_are_those_of_eager(schedule):
    with in_double_precision():
        check_against_eager(TURNED, MICROBATCHES, Shape(2, schedule))


@pytest.mark.parametrize("case", [TURNED, DROPPED])
def test_tables_are_computed_once(case):
    _, pipe = built_and_compiled(case, MICROBATCHES, Shape(2, "zb-h1"))
    result = pipe.run_local(case.data(MICROBATCHES), measure_memory=True)
    assert pipe.simulate().peak_memory == pytest.approx(result.peak_saved, rel=0.1, abs=64)  # of scalars
    assert pipe.check().holds
    for rank, (program, own) in enumerate(zip(pipe.artifact.programs, once_of(pipe), strict=True)):
        assert "rates" in pipe.plan.tensors[rank].buffers
        for op in ("arange", "tril", "cos"):  # the masks of all layers are one
            assert own.count(f" {op}(") == 1 == program.count(f" {op}(")
        assert not re.search("calls|keyed", own)
        assert "tril" not in "".join(v.name for s in pipe.sections for v in s.outputs)


def test_a_table_is_made_of_the_buffer_as_each_step_finds_it():
    model, pipe = built_and_compiled(TURNED, MICROBATCHES, Shape(2))
    batch = TURNED.data(MICROBATCHES)
    before = pipe.run_local(batch).loss
    pipe.load_state_dict({**pipe.state_dict(), "rates": model.rates * 3, "calls": torch.zeros(zoo.WIDTH)})
    other = Case(lambda: copy.deepcopy(model), numbers)
    assert model.rates.equal(pipe.state_dict()["rates"])
    _, again = built_and_compiled(other, MICROBATCHES, Shape(2))
    assert pipe.run_local(batch).loss == again.run_local(batch).loss != before


def test_what_the_forward_alone_uses_is_held_if_it_is_small():
    class Noted(nn.Module):
        def __init__(self, length):
            super().__init__()
            self.layer, self.length = nn.Linear(zoo.WIDTH, 32 * zoo.WIDTH), length

        def forward(self, x, y):
            return self.layer(x).tanh().mean() + (y.mean() + torch.arange(self.length).sin()).mean()

    for length, is_held in ((2, True), (64, False)):
        case = Case(lambda length=length: Noted(length), numbers)
        _, pipe = built_and_compiled(case, MICROBATCHES, Shape(1))
        assert bool(once_of(pipe)[0]) == is_held


def test_an_output_that_is_a_table_is_given():
    class Shown(Turned):
        def forward(self, x, y):
            return {"loss": super().forward(x, y), "mask": torch.ones(2, zoo.WIDTH).tril().exp()}

    given = {"ranks": 1, "microbatches": 2, "schedule": "1f1b", "outputs": ["mask"]}
    pipe = fxpipe.compile(Shown(), TURNED.example(), **given)
    found = pipe.run_local(TURNED.data(2), outputs=["mask"]).outputs["mask"]
    assert torch.equal(found, torch.ones(2, zoo.WIDTH).tril().exp().repeat(2, 1))


def test_casts_of_three_layers_and_more_are_a_loop():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(zoo.WIDTH, zoo.WIDTH) for _ in range(12)])
            self.last = nn.ModuleList([nn.Linear(zoo.WIDTH, zoo.WIDTH) for _ in range(2)])

        def forward(self, x, y):
            with torch.autocast("cpu", torch.bfloat16):
                for layer in (*self.layers, *self.last):
                    x = layer(x)
            return (x - y).square().mean()

    _, pipe = built_and_compiled(Case(Deep, numbers), MICROBATCHES, Shape(2))
    own = once_of(pipe)[1]
    assert own.count("for i in") == 1 < own.count('"last.1.')
    head, bias, weight = re.search(r"^ +for i in.*\n.*\n.*", own, re.MULTILINE)[0].splitlines()
    assert re.fullmatch(r" +for i in range\(\d, 12\):", head)
    for line, name in (bias, "bias"), (weight, "weight"):
        cast = f'to_copy(params[f"layers.{{i}}.{name}"], dtype=torch.bfloat16)'
        assert line == f'        once[f"layers.{{i}}.{name} as bfloat16"] = {cast}'
    assert pipe.check().holds


def test_a_table_of_each_layer_that_another_is_made_of():
    class Rated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(zoo.WIDTH, zoo.WIDTH) for _ in range(4)])
            for layer in self.layers:
                layer.register_buffer("rates", torch.rand(zoo.WIDTH))

        def forward(self, x, y):
            for layer in self.layers:
                wave = layer.rates.cos()
                x = torch.tanh(layer(x) * wave).square() * wave.flip(0)
            return (x - y).square().mean()

    case = Case(Rated, numbers)
    _, pipe = built_and_compiled(case, MICROBATCHES, Shape(1))
    (own,) = once_of(pipe)
    assert 0 < own.index("for i in range(1, 4):") < own.index("= flip(once[")
    with in_double_precision():
        check_against_eager(case, MICROBATCHES, Shape(1))
